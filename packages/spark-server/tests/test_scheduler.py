"""The scheduler against a scripted model: order, budget, endings, and no block lost."""

import re

import pytest

from spark_runtime.types import SamplingParams, StepResult
from spark_server.engine.frames import Output, Submit
from spark_server.engine.testing import scripted_tokens
from spark_server.scheduler.testing import Bench, prompt_of


@pytest.mark.parametrize("max_prefill_tokens", [0, 1, 5, 16, 1000])
def test_step_gives_the_same_tokens_alone_and_together(max_prefill_tokens: int) -> None:
    lengths = [1, 3, 4, 17, 40, 64, 9, 2]
    bench = Bench(max_prefill_tokens=max_prefill_tokens, num_blocks=40, max_batch_size=4)
    for id, length in enumerate(lengths):
        bench.scheduler.submit(Submit(id, prompt_of(length, id), 10, SamplingParams(temperature=0.0)))
    bench.finish()
    for id, length in enumerate(lengths):
        assert bench.tokens(id) == scripted_tokens(prompt_of(length, id), 10, sampling=SamplingParams(temperature=0.0))
        assert bench.ending(id).finish == "length"
    assert sorted(bench.runner.released) == list(range(len(lengths)))
    bench.assert_idle()


def test_step_never_exceeds_the_prefill_budget_and_never_pauses_decode() -> None:
    bench = Bench(max_prefill_tokens=8)
    bench.scheduler.submit(Submit(1, prompt_of(2), 60))
    bench.scheduler.submit(Submit(2, prompt_of(2, 1), 60))
    bench.step()
    bench.scheduler.submit(Submit(3, prompt_of(50, 2), 5))
    while not bench.tokens(3):
        bench.step()
    chunks = [[len(step.token_ids) for step in batch if step.sequence == 3] for batch in bench.runner.steps[1:]]
    assert chunks == [[8], [8], [8], [8], [8], [8], [2]]
    for batch in bench.runner.steps[1:]:
        assert [step.sequence for step in batch] == [1, 2, 3]


def test_step_shares_the_budget_among_prompts_in_order() -> None:
    bench = Bench(max_prefill_tokens=8)
    for id, length in [(1, 3), (2, 9), (3, 4)]:
        bench.scheduler.submit(Submit(id, prompt_of(length, id), 4))
    bench.step()
    bench.step()
    first, second = bench.runner.steps
    assert [(step.sequence, len(step.token_ids), step.sampling is None) for step in first] == [
        (1, 3, False),
        (2, 5, True),
    ]
    assert [(step.sequence, step.start, len(step.token_ids)) for step in second] == [(1, 3, 1), (2, 5, 4), (3, 0, 4)]


def test_step_without_a_budget_cuts_no_prompt() -> None:
    bench = Bench(max_prefill_tokens=0, max_model_len=50)
    for id, length in [(1, 30), (2, 30), (3, 10)]:
        bench.scheduler.submit(Submit(id, prompt_of(length, id), 4))
    bench.finish()
    prefills = [
        [(step.sequence, len(step.token_ids)) for step in batch if step.start == 0] for batch in bench.runner.steps
    ]
    assert prefills[:2] == [[(1, 30)], [(2, 30), (3, 10)]]


def test_decode_step_passes_one_token_and_the_same_block_list() -> None:
    bench = Bench()
    bench.scheduler.submit(Submit(1, prompt_of(30), 20))
    bench.finish()
    steps = [batch[0] for batch in bench.runner.steps]
    assert all(len(step.token_ids) == 1 for step in steps[2:])
    assert all(step.block_ids is steps[0].block_ids for step in steps)


def test_first_output_comes_with_admission() -> None:
    bench = Bench(max_prefill_tokens=4, max_batch_size=1)
    bench.scheduler.submit(Submit(1, prompt_of(6), 1))
    bench.scheduler.submit(Submit(2, prompt_of(3), 1))
    assert bench.step() == [Output(1, [])]
    (output,) = bench.step()
    assert (output.request_id, len(output.token_ids), output.finish) == (1, 1, "length")
    (output,) = bench.step()
    assert (output.request_id, len(output.token_ids)) == (2, 1)


def test_admission_never_passes_the_head_of_the_queue() -> None:
    bench = Bench(num_blocks=10)
    bench.scheduler.submit(Submit(1, prompt_of(8), 20))  # 3 blocks to start with, 7 of 10 at its end
    bench.step()
    bench.scheduler.submit(Submit(2, prompt_of(21), 20))  # 7 blocks and 1 for the other: has to wait
    bench.scheduler.submit(Submit(3, prompt_of(2), 2))  # 1 block: would fit
    for _ in range(19):
        assert bench.scheduler.has_work and not bench.outputs[2] and not bench.outputs[3]
        bench.step()
    assert bench.ending(1).finish == "length"
    bench.step()
    assert bench.outputs[2] and bench.outputs[3]
    bench.finish()
    bench.assert_idle()


@pytest.mark.parametrize(("num_blocks", "num_running"), [(2, 1), (4, 1), (5, 2), (7, 2), (8, 3)])
def test_admission_leaves_one_block_to_each_that_may_grow(num_blocks: int, num_running: int) -> None:
    bench = Bench(num_blocks=num_blocks)
    for id in range(3):
        bench.scheduler.submit(Submit(id, prompt_of(2, id), 50))  # 2 blocks to start with
    bench.step()
    assert bench.scheduler.stats().running == num_running


def test_admission_leaves_nothing_to_those_that_cannot_grow() -> None:
    bench = Bench(num_blocks=3)
    for id in range(4):
        bench.scheduler.submit(Submit(id, prompt_of(2, id), 3))  # 1 block, never more
    bench.step()
    assert bench.scheduler.stats().running == 3


def test_admission_takes_a_request_that_needs_the_whole_pool() -> None:
    bench = Bench(num_blocks=5)
    bench.scheduler.submit(Submit(1, prompt_of(20), 1))
    bench.scheduler.submit(Submit(2, prompt_of(1, 2), 20))
    bench.finish()
    assert [bench.ending(id).finish for id in (1, 2)] == ["length", "length"]
    assert len(bench.tokens(2)) == 20


def test_max_batch_size_bounds_what_runs() -> None:
    bench = Bench(max_batch_size=3)
    for id in range(10):
        bench.scheduler.submit(Submit(id, prompt_of(2, id), 3))
    while bench.scheduler.has_work:
        bench.step()
        assert bench.scheduler.stats().running <= 3
    assert max(len(batch) for batch in bench.runner.steps) == 3


def test_answer_ends_at_the_context() -> None:
    bench = Bench(max_model_len=20)
    bench.scheduler.submit(Submit(1, prompt_of(15), 100))
    bench.finish()
    assert len(bench.tokens(1)) == 5 and bench.ending(1).finish == "length"


def test_answer_ends_where_the_pool_does() -> None:
    bench = Bench(num_blocks=4)
    assert bench.scheduler.context == 17
    bench.scheduler.submit(Submit(1, prompt_of(10), 100))
    bench.finish()
    assert len(bench.tokens(1)) == 7 and bench.ending(1).finish == "length"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Submit(1, prompt_of(40), 4), "prompt has 40 tokens, the limit is 39: --max-model-len 40 less one token"),
        (Submit(1, prompt_of(17), 4), r"prompt has 17 tokens, the KV cache holds 16 \(4 blocks of 4\)"),
        (Submit(1, [], 4), "prompt is empty"),
        (Submit(1, [5], 0), "max_tokens is 0, at least 1"),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_numbers(request_: Submit, message: str) -> None:
    bench = Bench(num_blocks=4, max_model_len=40)
    bench.scheduler.submit(request_)
    bench.finish()
    ending = bench.ending(1)
    assert ending.finish == "error" and re.search(message, ending.error or "")
    assert bench.runner.steps == []
    bench.assert_idle()


def test_overflow_is_refused_and_harms_nobody() -> None:
    bench = Bench(max_num_seqs=2)
    for id in (1, 2, 3):
        bench.scheduler.submit(Submit(id, prompt_of(3, id), 3))
    bench.finish()
    assert [bench.ending(id).finish for id in (1, 2, 3)] == ["length", "length", "error"]
    assert "2 requests run or wait" in (bench.ending(3).error or "")


def test_request_id_in_use_is_a_fault() -> None:
    bench = Bench()
    bench.scheduler.submit(Submit(1, prompt_of(3), 3))
    with pytest.raises(ValueError, match="request id 1 is in use"):
        bench.scheduler.submit(Submit(1, prompt_of(3), 3))


def test_stop_token_ends_the_answer_and_is_in_it() -> None:
    tokens = scripted_tokens(prompt_of(5), 10)
    bench = Bench()
    bench.scheduler.submit(Submit(1, prompt_of(5), 10, stop_token_ids=[999_999, tokens[3]]))
    bench.finish()
    assert bench.tokens(1) == tokens[:4]
    assert (bench.ending(1).finish, bench.ending(1).stop_token_id) == ("stop", tokens[3])


def test_stop_token_as_the_last_allowed_token_is_a_stop() -> None:
    tokens = scripted_tokens(prompt_of(5), 3)
    bench = Bench()
    bench.scheduler.submit(Submit(1, prompt_of(5), 3, stop_token_ids=[tokens[2]]))
    bench.finish()
    assert (bench.ending(1).finish, bench.ending(1).stop_token_id) == ("stop", tokens[2])


def test_stop_token_is_forbidden_until_min_tokens_are_made() -> None:
    stop = scripted_tokens(prompt_of(5), 1)
    bench = Bench(max_prefill_tokens=3)
    bench.scheduler.submit(Submit(1, prompt_of(5), 10, stop_token_ids=stop, min_tokens=3))
    bench.finish()
    assert bench.tokens(1) == scripted_tokens(prompt_of(5), 10, stop_token_ids=stop, min_tokens=3)
    forbidden = [batch[0].forbidden for batch in bench.runner.steps]
    assert forbidden[:5] == [(), tuple(stop), tuple(stop), tuple(stop), ()]


def test_sampling_goes_to_the_runner_as_asked() -> None:
    bench = Bench()
    bench.scheduler.submit(Submit(1, [1], 1, SamplingParams(0.5, 0.9, 4, 0.1, 77)))
    bench.step()
    assert bench.runner.steps[0][0].sampling == SamplingParams(0.5, 0.9, 4, 0.1, 77)


def test_abort_while_waiting_prefilling_or_decoding_frees_at_once() -> None:
    bench = Bench(max_prefill_tokens=4, max_batch_size=2)
    bench.scheduler.submit(Submit(1, prompt_of(2), 50))
    bench.scheduler.submit(Submit(2, prompt_of(40), 50))
    bench.scheduler.submit(Submit(3, prompt_of(2), 50))
    for _ in range(3):
        bench.step()
    for id in (3, 2, 1):
        bench.scheduler.abort(id)
    bench.assert_idle()
    assert not bench.scheduler.has_work
    assert bench.runner.released == [2, 1]
    assert bench.step() == []
    assert all(output.finish is None for outputs in bench.outputs.values() for output in outputs)


def test_abort_of_a_refused_or_unknown_request_says_nothing() -> None:
    bench = Bench()
    bench.scheduler.submit(Submit(1, [], 5))
    bench.scheduler.abort(1)
    bench.scheduler.abort(99)
    assert bench.step() == [] and not bench.scheduler.has_work


def test_deadline_ends_running_and_waiting_requests() -> None:
    bench = Bench(max_batch_size=2, max_prefill_tokens=4)
    bench.scheduler.submit(Submit(1, prompt_of(2), 100, deadline_s=10))
    bench.scheduler.submit(Submit(2, prompt_of(60), 3))
    bench.scheduler.submit(Submit(3, prompt_of(2), 3, deadline_s=5))
    bench.step()
    bench.now = 5.0
    assert Output(3, [], "timeout") in bench.step()
    bench.now = 9.9
    bench.step()
    assert len(bench.tokens(1)) == 3
    bench.now = 10.0
    assert Output(1, [], "timeout") in bench.step()
    bench.finish()
    assert bench.ending(2).finish == "length"
    bench.assert_idle()


def test_runner_that_breaks_its_contract_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_prefill_tokens=2)
    bench.scheduler.submit(Submit(1, prompt_of(8), 3))
    monkeypatch.setattr(bench.runner, "step", lambda steps: StepResult([5 for _ in steps]))
    with pytest.raises(RuntimeError, match="runner gave token 5"):
        bench.step()
