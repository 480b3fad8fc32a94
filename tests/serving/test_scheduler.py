"""Who runs next, and in which row."""

from hypothesis import given
from hypothesis import strategies as st

from tuneship.serving.scheduler import Move, Scheduler
from tuneship.serving.sequence import FinishReason, GenerateRequest, Sequence


def waiting(name: str, prompt: int = 4) -> Sequence:
    return Sequence(name, GenerateRequest((1,) * prompt, max_tokens=9), token_limit=9)


def names(scheduler: Scheduler) -> str:
    return "".join(sequence.id for sequence in scheduler.running)


def test_those_who_came_first_run_first_and_the_rest_wait() -> None:
    scheduler = Scheduler(rows=2, prompt_tokens=100)
    for name in "abc":
        scheduler.add(waiting(name))
    assert scheduler.schedule() == 2
    assert names(scheduler) == "ab"
    assert scheduler.schedule() == 0
    scheduler.release(scheduler.running[0])
    assert scheduler.schedule() == 1
    assert names(scheduler) == "bc"


def test_the_last_row_moves_into_the_gap_so_that_rows_stay_a_prefix() -> None:
    scheduler = Scheduler(rows=4, prompt_tokens=100)
    for name, prompt in (("a", 4), ("b", 5), ("c", 6)):
        scheduler.add(waiting(name, prompt))
    scheduler.schedule()
    assert scheduler.release(scheduler.running[0]) == Move(source=2, target=0, length=6)
    assert names(scheduler) == "cb"
    assert scheduler.release(scheduler.running[1]) is None


def test_a_step_takes_in_no_more_prompt_tokens_than_its_budget() -> None:
    scheduler = Scheduler(rows=8, prompt_tokens=10)
    for name in "abc":
        scheduler.add(waiting(name, prompt=5))
    assert scheduler.schedule() == 2
    assert scheduler.schedule() == 1


def test_a_prompt_above_the_budget_joins_alone_instead_of_waiting_for_ever() -> None:
    scheduler = Scheduler(rows=8, prompt_tokens=10)
    for name, prompt in (("a", 99), ("b", 2)):
        scheduler.add(waiting(name, prompt))
    assert scheduler.schedule() == 1
    assert scheduler.schedule() == 1


@given(
    st.lists(st.sampled_from(["add", "step", "release"]), max_size=60), st.integers(1, 5), st.data()
)
def test_every_running_sequence_knows_its_own_row(
    events: list[str], rows: int, data: st.DataObject
) -> None:
    scheduler = Scheduler(rows=rows, prompt_tokens=12)
    for number, event in enumerate(events):
        if event == "add":
            scheduler.add(waiting(str(number), prompt=1 + number % 7))
        elif event == "step":
            scheduler.schedule()
        elif scheduler.running:
            scheduler.release(data.draw(st.sampled_from(scheduler.running)))
        assert [sequence.row for sequence in scheduler.running] == list(
            range(len(scheduler.running))
        )
        assert len(scheduler.running) <= rows


def test_a_stop_token_ends_a_sequence_and_is_not_part_of_it() -> None:
    sequence = Sequence("a", GenerateRequest((1,), max_tokens=5, stop_tokens=(0, 2)), token_limit=5)
    assert sequence.append(7) is None
    assert sequence.append(2) is FinishReason.STOP
    assert sequence.generated == [7]
