"""Gates: measurements and limits in, verdicts out. Pure: no clock, no files, no network, no Prefect.

A rollout, per look (`canary.py`; the facts are in `record.py`, one JSON line each):
1. once, before the first shift: `choose_gates(plan, baseline_metrics)`, `usual_hour(series, plan)` of an answer
   from before the start -> `Begun`; then `SplitIntended`, PATCH, `SplitConfirmed(weight, at=<its end_time>)`
2. ask both deployments and their metrics; write `Probed` where the pipeline's own driver counts
3. `decide(Observed(...), plan, record)` -> a `Look`; append it to the record *before* acting on it
4. act: `ADVANCE` / `PROMOTE` = shift to `look.next_weight`; `ASK` = `ApprovalAsked`, later `ApprovalAnswered`;
   `ROLLBACK`, `PAUSE`, `ABORT`, `BAKED` end the looking, `look.reason` is the result's reason
Each shift is `SplitIntended`, PATCH, read back, `SplitConfirmed(at=<time of the change>)`. `replay` decides a whole
record again.

A training job: `divergence.watch_training` at every poll, `training_gates.judge_training` once it ended,
`smoke_test.judge_smoke` on the deployed model at 0 % traffic.
An evaluation: `evaluation.look` after every 25 examples, `evaluation.judge` at the end.
Before the first shift, `forecast.forecast` says how long a plan will take at today's traffic. A record names the
formula that judges it, and one that this release does not know is refused (`formula.py`).
Where to read on: `evidence.py` is the statistics, `series.py` what a metrics answer may hold.
"""
