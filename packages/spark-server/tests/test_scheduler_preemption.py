"""Answers that outgrow the KV pool: who gives way, who goes on, and a client that sees nothing but a pause."""

import pytest

from spark_runtime.types import SamplingParams
from spark_server.engine.frames import Output, Submit
from spark_server.engine.testing import scripted_tokens
from spark_server.scheduler.testing import Bench, prompt_of

UNBOUNDED = 10_000


def step_until_preempted(bench: Bench) -> None:
    before = bench.scheduler.stats().preemptions
    for _ in range(500):
        bench.step()
        if bench.scheduler.stats().preemptions > before:
            return
    raise AssertionError("nothing is preempted")


def two_that_collide(deadline_s: float = 0.0) -> Bench:
    """9 blocks of 4, and two requests that need 8 each at their end."""
    bench = Bench(num_blocks=9)
    bench.scheduler.submit(Submit(1, prompt_of(6), 25))
    bench.scheduler.submit(Submit(2, prompt_of(5, 1), 25, deadline_s=deadline_s))
    return bench


def test_eight_short_answers_of_unbounded_requests_run_together_in_a_pool_of_one_context() -> None:
    bench = Bench(num_blocks=64, max_model_len=256, max_batch_size=8, max_prefill_tokens=64)
    for id in range(8):
        tokens = scripted_tokens(prompt_of(5, id), 20)
        bench.scheduler.submit(Submit(id, prompt_of(5, id), UNBOUNDED, stop_token_ids=tokens[-1:]))
    bench.step()
    assert bench.scheduler.stats().running == 8
    bench.finish()
    assert len(bench.runner.steps) == 20 and all(len(batch) == 8 for batch in bench.runner.steps)
    for id in range(8):
        assert bench.tokens(id) == scripted_tokens(prompt_of(5, id), 20) and bench.ending(id).finish == "stop"
    assert bench.scheduler.stats().preemptions == 0
    bench.assert_idle()


def test_sequences_that_grow_side_by_side_stay_contiguous() -> None:
    bench = Bench(num_blocks=64, max_batch_size=4, max_prefill_tokens=64)
    for id in range(4):
        bench.scheduler.submit(Submit(id, prompt_of(5, id), 50))
    bench.finish()
    for step in bench.runner.steps[-1]:
        first = step.block_ids[0]
        assert list(step.block_ids) == list(range(first, first + 14))


def test_victim_is_the_newest_and_goes_on_where_it_was() -> None:
    bench = two_that_collide()
    step_until_preempted(bench)
    made = len(bench.tokens(2))
    assert 0 < made < 25 and bench.runner.released == [2]
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (1, 1, 1)
    bench.finish()
    for id, length in [(1, 6), (2, 5)]:
        assert bench.tokens(id) == scripted_tokens(prompt_of(length, id - 1), 25)
        assert bench.ending(id).finish == "length"
        assert all(len(output.token_ids) == 1 for output in bench.outputs[id])
    (restart,) = [step for batch in bench.runner.steps[1:] for step in batch if step.start == 0]
    assert restart.sequence == 2 and list(restart.token_ids) == (prompt_of(5, 1) + bench.tokens(2)[:made])[:16]
    assert bench.runner.released == [2, 1, 2]
    bench.assert_idle()


def test_victim_may_be_the_one_that_needs_the_block() -> None:
    bench = Bench(num_blocks=8)
    bench.scheduler.submit(Submit(1, prompt_of(16), 9))  # 5 blocks, then the last that it ever needs
    bench.scheduler.submit(Submit(2, prompt_of(3, 1), UNBOUNDED))  # 2 blocks, then a third
    step_until_preempted(bench)
    (batch,) = bench.runner.steps[-1:]
    assert [(step.sequence, step.start) for step in batch] == [(1, 22)]
    assert (len(bench.tokens(1)), len(bench.tokens(2)), bench.runner.released) == (8, 6, [2])
    bench.finish()
    assert bench.tokens(1) == scripted_tokens(prompt_of(16), 9)
    assert bench.tokens(2) == scripted_tokens(prompt_of(3, 1), bench.scheduler.context - 3)


def test_victim_comes_back_before_newer_requests_and_after_something_ended() -> None:
    bench = two_that_collide()
    bench.scheduler.submit(Submit(3, prompt_of(30, 2), 5))
    step_until_preempted(bench)
    bench.scheduler.submit(Submit(4, prompt_of(1, 3), 1))
    while not any(output.finish for output in bench.outputs[1]):
        assert not bench.outputs[3] and not bench.outputs[4]
        assert bench.scheduler.stats().running == 1
        bench.step()
    bench.finish()
    order = [step.sequence for batch in bench.runner.steps for step in batch if step.start == 0]
    assert order == [1, 2, 2, 3, 4]


def test_oldest_makes_a_token_in_every_step_and_all_come_to_their_end() -> None:
    bench = Bench(num_blocks=12, max_batch_size=6, max_prefill_tokens=64)
    for id in range(6):
        bench.scheduler.submit(Submit(id, prompt_of(3, id), UNBOUNDED))
    for id in range(6):
        while not any(output.finish for output in bench.outputs[id]):
            before = len(bench.tokens(id))
            bench.step()
            assert len(bench.tokens(id)) == before + 1
    assert bench.scheduler.stats().preemptions >= 5
    for id in range(6):
        assert bench.tokens(id) == scripted_tokens(prompt_of(3, id), bench.scheduler.context - 3)
    bench.assert_idle()


def test_victim_that_has_no_token_yet_is_not_admitted_twice() -> None:
    bench = Bench(num_blocks=10, max_prefill_tokens=1)
    bench.scheduler.submit(Submit(1, prompt_of(2), 30))
    bench.step()
    bench.step()
    bench.scheduler.submit(Submit(2, prompt_of(24, 1), 3))  # 7 blocks; its prompt is not done when 1 needs a fourth
    step_until_preempted(bench)
    assert bench.outputs[2] == [Output(2, [])]
    bench.finish()
    assert [len(output.token_ids) for output in bench.outputs[2]] == [0, 1, 1, 1]
    assert bench.tokens(2) == scripted_tokens(prompt_of(24, 1), 3)


def test_min_tokens_max_tokens_and_sampling_count_over_the_pause() -> None:
    stop = scripted_tokens(prompt_of(5, 1), 1, sampling=SamplingParams(seed=3))
    for min_tokens in (0, 3, 16, 24):
        bench = Bench(num_blocks=9)
        bench.scheduler.submit(Submit(1, prompt_of(6), 25))
        request = Submit(2, prompt_of(5, 1), 25, SamplingParams(seed=3), stop_token_ids=stop, min_tokens=min_tokens)
        bench.scheduler.submit(request)
        bench.finish()
        assert bench.tokens(2) == scripted_tokens(
            prompt_of(5, 1), 25, sampling=SamplingParams(seed=3), stop_token_ids=stop, min_tokens=min_tokens
        )
        forbidden = [s.forbidden for batch in bench.runner.steps for s in batch if s.sequence == 2 and s.sampling]
        assert forbidden == [tuple(stop)] * min_tokens + [()] * (len(bench.tokens(2)) - min_tokens)
        assert bench.scheduler.stats().preemptions == (1 if len(bench.tokens(2)) > 15 else 0)


def test_deadline_counts_over_the_pause() -> None:
    bench = two_that_collide(deadline_s=5.0)
    step_until_preempted(bench)
    bench.now = 5.0
    assert Output(2, [], "timeout") in bench.step()
    bench.finish()
    assert len(bench.tokens(1)) == 25 and bench.runner.released == [2, 1]
    bench.assert_idle()


def test_abort_in_the_pause_says_nothing_more() -> None:
    bench = two_that_collide()
    step_until_preempted(bench)
    num_outputs = len(bench.outputs[2])
    bench.scheduler.abort(2)
    assert bench.scheduler.stats().waiting == 0
    bench.finish()
    assert len(bench.outputs[2]) == num_outputs and bench.runner.released == [2, 1]
    bench.assert_idle()


@pytest.mark.parametrize("max_prefill_tokens", [0, 1, 7])
def test_resumed_prompt_keeps_to_the_budget(max_prefill_tokens: int) -> None:
    bench = Bench(num_blocks=9, max_model_len=40, max_prefill_tokens=max_prefill_tokens)
    bench.scheduler.submit(Submit(1, prompt_of(6), 25))
    bench.scheduler.submit(Submit(2, prompt_of(5, 1), 25))
    bench.finish()
    assert bench.scheduler.stats().preemptions == 1
    assert max(len(step.token_ids) for batch in bench.runner.steps for step in batch) <= (max_prefill_tokens or 40)
    assert bench.tokens(2) == scripted_tokens(prompt_of(5, 1), 25)
