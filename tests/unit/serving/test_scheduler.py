"""Tests of which sequence runs next, and of how much of its prompt enters."""

from hypothesis import given
from hypothesis import strategies as st

from tuneship.serving.scheduler import OWNER_MEMORY_STEPS, Scheduler
from tuneship.serving.sequence import FinishReason, GenerateRequest, Sequence


def waiting(name: str, prompt: int = 4) -> Sequence:
    return Sequence(name, GenerateRequest((1,) * prompt, max_tokens=9), token_limit=9)


def step(scheduler: Scheduler) -> list[int]:
    """Ask for a step, and count its parts as cached, as the engine does afterwards."""
    parts = scheduler.schedule()
    for sequence, part in zip(scheduler.running[-len(parts) :], parts, strict=False):
        sequence.cached += part
    return parts


def beside_one(prompt_tokens: int) -> Scheduler:
    """Make a scheduler in which one row generates already."""
    scheduler = Scheduler(slots=8, prompt_tokens=prompt_tokens)
    scheduler.add(waiting("generating", prompt=1))
    step(scheduler)
    return scheduler


def names(scheduler: Scheduler) -> str:
    return "".join(sequence.id for sequence in scheduler.running)


def test_those_who_came_first_run_first_and_the_rest_wait() -> None:
    scheduler = Scheduler(slots=2, prompt_tokens=100)
    for name in "abc":
        scheduler.add(waiting(name))
    assert step(scheduler) == [4, 4]
    assert names(scheduler) == "ab"
    assert step(scheduler) == []
    scheduler.release(scheduler.running[0])
    assert step(scheduler) == [4]
    assert names(scheduler) == "bc"


def test_one_that_goes_on_comes_before_all_that_wait() -> None:
    scheduler = Scheduler(slots=1, prompt_tokens=100)
    for name in "abc":
        scheduler.add(waiting(name))
    step(scheduler)
    (first,) = scheduler.running
    scheduler.release(first)
    first.restart()
    scheduler.add_first(first)
    step(scheduler)
    assert names(scheduler) == "a"
    assert scheduler.waiting == 2


def test_a_step_takes_in_no_more_prompt_tokens_than_its_budget() -> None:
    scheduler = beside_one(prompt_tokens=10)
    for name in "abc":
        scheduler.add(waiting(name, prompt=6))
    assert step(scheduler) == [6, 4]
    assert step(scheduler) == [2, 6]
    assert step(scheduler) == []


def test_a_long_prompt_enters_in_parts_and_the_next_joins_with_its_last_one() -> None:
    scheduler = beside_one(prompt_tokens=10)
    for name, prompt in (("a", 25), ("b", 2)):
        scheduler.add(waiting(name, prompt))
    assert [step(scheduler) for _ in range(4)] == [[10], [10], [5, 2], []]


def test_while_none_generates_twice_as_many_enter() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=10)
    for name, prompt in (("a", 5), ("b", 40)):
        scheduler.add(waiting(name, prompt))
    assert [step(scheduler) for _ in range(4)] == [[5, 15], [10], [10], [5]]


def test_the_more_rows_generate_the_more_prompt_tokens_a_step_may_take() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=4)
    for name in "abcd":
        scheduler.add(waiting(name, prompt=1))
    step(scheduler)
    scheduler.add(waiting("long", prompt=50))
    assert [step(scheduler) for _ in range(2)] == [[8], [8]]


def of_queue(queue: str, number: int) -> Sequence:
    request = GenerateRequest((1,), max_tokens=9, queue=queue)
    return Sequence(f"{queue}{number} ", request, token_limit=9)


def test_queues_take_turns_so_that_a_hundred_requests_do_not_hold_up_one() -> None:
    scheduler = Scheduler(slots=1, prompt_tokens=100)
    for number in range(100):
        scheduler.add(of_queue("a", number))
    scheduler.add(of_queue("b", 0))
    scheduler.add(of_queue("c", 0))
    order = ""
    for _ in range(5):
        step(scheduler)
        order += names(scheduler)
        scheduler.release(scheduler.running[0])
    assert order == "a0 b0 c0 a1 a2 "
    scheduler.add(of_queue("b", 1))
    for _ in range(2):
        step(scheduler)
        order += names(scheduler)
        scheduler.release(scheduler.running[0])
    assert order.endswith("a3 b1 ")


def of_owner(owner: str, queue: str, number: int) -> Sequence:
    request = GenerateRequest((1,), max_tokens=9, queue=queue, owner=owner)
    return Sequence(f"{queue}{number} ", request, token_limit=9)


def one_step_each(scheduler: Scheduler, steps: int) -> str:
    """Return the names that run in each step, when each sequence runs for one step alone."""
    order = ""
    for _ in range(steps):
        step(scheduler)
        order += names(scheduler)
        for one in list(scheduler.running):
            scheduler.release(one)
    return order


def test_owners_take_turns_however_many_queues_each_has() -> None:
    scheduler = Scheduler(slots=1, prompt_tokens=1)
    for queue in range(50):
        scheduler.add(of_owner("alice", f"a{queue}.", 0))
    scheduler.add(of_owner("bob", "b.", 0))
    scheduler.add(of_owner("bob", "c.", 0))
    assert one_step_each(scheduler, 2).split() == ["a0.0", "b.0"]
    # It joins the existing queue a1, which keeps its turn.
    scheduler.add(of_owner("alice", "a1.", 1))
    assert one_step_each(scheduler, 3).split() == ["a1.0", "c.0", "a2.0"]


def test_an_owner_that_has_nothing_running_gets_a_row_although_another_has_all() -> None:
    scheduler = Scheduler(slots=4, prompt_tokens=100)
    for number in range(10):
        scheduler.add(of_owner("alice", f"a{number % 3}.", number))
    step(scheduler)
    assert len(scheduler.running) == 4
    scheduler.add(of_owner("bob", "b.", 0))
    scheduler.add(of_owner("bob", "b.", 1))
    step(scheduler)
    step(scheduler)
    assert names(scheduler).count("b.") == 1
    for number in range(20):
        scheduler.add(of_owner(f"owner{number}", f"o{number}.", 0))
    for _ in range(5):
        step(scheduler)
    assert len(scheduler.running) == scheduler.total_slots == 5


def test_an_owner_has_a_quarter_of_the_rows_while_there_are_others() -> None:
    """An owner gets all rows again a while after the last request of another owner."""
    scheduler = Scheduler(slots=8, prompt_tokens=100)
    scheduler.add(of_owner("bob", "b.", 0))
    step(scheduler)
    for number in range(20):
        scheduler.add(of_owner("alice", "a.", number))
    step(scheduler)
    assert len(scheduler.running) == 1 + 2
    scheduler.release(scheduler.running[0])
    for _ in range(OWNER_MEMORY_STEPS):
        step(scheduler)
    assert len(scheduler.running) == 2
    step(scheduler)
    assert len(scheduler.running) == 8


def test_without_a_queue_of_their_own_requests_wait_by_adapter() -> None:
    scheduler = Scheduler(slots=1, prompt_tokens=100)
    for number, adapter in enumerate(["x", "x", "x", None]):
        request = GenerateRequest((1,), max_tokens=9, adapter=adapter)
        scheduler.add(Sequence(str(number), request, token_limit=9))
    order = ""
    while not scheduler.idle:
        step(scheduler)
        order += names(scheduler)
        scheduler.release(scheduler.running[0])
    assert order == "0312"


def test_a_request_without_room_waits_and_nobody_overtakes_it() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=100, cache_tokens=60)
    for name, prompt in (("a", 4), ("big", 40), ("c", 4)):
        scheduler.add(waiting(name, prompt))
    step(scheduler)
    assert names(scheduler) == "a"
    assert step(scheduler) == []
    scheduler.release(scheduler.running[0])
    step(scheduler)
    assert names(scheduler) == "big"
    scheduler.release(scheduler.running[0])
    step(scheduler)
    assert names(scheduler) == "c"


def test_a_request_that_would_not_even_fit_alone_is_distinguished() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=100, cache_tokens=60)
    assert scheduler.fits(waiting("a", prompt=51))
    assert not scheduler.fits(waiting("a", prompt=52))


@given(
    st.lists(st.sampled_from(["add", "step", "release", "forget"]), max_size=60),
    st.integers(1, 5),
    st.sampled_from([None, 40]),
    st.data(),
)
def test_those_who_generate_stand_before_at_most_one_that_enters(
    events: list[str], rows: int, room: int | None, data: st.DataObject
) -> None:
    scheduler = Scheduler(slots=rows, prompt_tokens=12, cache_tokens=room)
    held: list[Sequence] = []
    for number, event in enumerate(events):
        if event == "add":
            held.append(waiting(str(number), prompt=1 + 5 * (number % 7)))
            scheduler.add(held[-1])
        elif event == "step":
            generates = any(not one.is_prefilling for one in scheduler.running)
            assert sum(step(scheduler)) <= (12 if generates else 24)
        elif event == "release" and scheduler.running:
            gone = data.draw(st.sampled_from(scheduler.running))
            scheduler.release(gone)
            held.remove(gone)
        elif event == "forget" and scheduler.waiting:
            gone = data.draw(st.sampled_from([one for one in held if one not in scheduler.running]))
            scheduler.remove(gone)
            held.remove(gone)
        running = scheduler.running
        assert len(set(running)) == len(running)
        assert set(running) <= set(held)
        assert not any(sequence.is_prefilling for sequence in running[:-1])
        assert len(running) <= rows
        assert room is None or len(running) * max([0, *(o.max_length for o in running)]) <= room
        assert scheduler.waiting == len(held) - len(running)
        assert scheduler.idle == (not held)


def test_a_stop_token_ends_a_sequence_and_is_not_part_of_it() -> None:
    sequence = Sequence("a", GenerateRequest((1,), max_tokens=5, stop_tokens=(0, 2)), token_limit=5)
    assert sequence.append(7) is None
    assert sequence.append(2) is FinishReason.STOP
    assert sequence.generated == [7]


def background(name: str, owner: str = "") -> Sequence:
    request = GenerateRequest((1,), max_tokens=9, owner=owner, is_background=True)
    return Sequence(name, request, token_limit=9)


def test_the_background_joins_only_while_nobody_else_waits() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=1)
    for name in "xy":
        scheduler.add(background(name))
    for name in "ab":
        scheduler.add(waiting(name, prompt=1))
    # The first step has room for two prompt tokens.
    for expected in ("ab", "abxy"):
        step(scheduler)
        assert names(scheduler) == expected
    assert scheduler.waiting == 0


def test_the_background_leaves_half_of_the_slots_free() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=100)
    for number in range(20):
        scheduler.add(background(str(number), owner=str(number % 2)))
    step(scheduler)
    assert len(scheduler.running) == 4
    for number in range(8):
        scheduler.add(of_owner("alice", "a", number))
    step(scheduler)
    # Eight slots and two for guests: those who come find all of them that the background has left.
    assert len(scheduler.running) == 10
    assert sum(one.request.is_background for one in scheduler.running) == 4


def test_beside_others_the_background_has_the_share_of_one_owner() -> None:
    scheduler = Scheduler(slots=8, prompt_tokens=100)
    scheduler.add(of_owner("alice", "a", 0))
    for number in range(20):
        scheduler.add(background(str(number), owner="bob"))
    step(scheduler)
    assert sum(one.request.is_background for one in scheduler.running) == 2


def test_a_background_sequence_that_waits_can_be_cancelled() -> None:
    scheduler = Scheduler(slots=1, prompt_tokens=100)
    first, second = background("a"), background("b")
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.remove(second)
    scheduler.release(first)
    assert scheduler.idle
