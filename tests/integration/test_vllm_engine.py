"""The vLLM engine against transformers on the same tokens and weights. One engine serves the whole file: a start takes 10 s."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rtpo_ray.engines.vllm import VllmEngine
from rtpo_ray.errors import EngineError
from rtpo_ray.types import Completion, Sampling
from tests.integration.tiny import VOCAB, load_tiny_qwen3, perturb, save_tiny_qwen3, score

STOP = 3


@dataclass
class Served:
    """The engine, and the transformers model whose weights it holds."""

    engine: VllmEngine
    model: Any

    def push(self, *, seed: int) -> None:
        """Change every weight of the model and load the result under the next version."""
        perturb(self.model, seed=seed)
        self.engine.load_weights(self.model.state_dict().items(), self.engine.weight_version + 1)

    def gap(self, contexts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0) -> float:
        """Largest difference between the engine's and transformers' log-probabilities."""
        return max(abs(ours - theirs)
                   for context, completion in zip(contexts, completions, strict=True)
                   for ours, theirs in zip(completion.logprobs, score(self.model, context, completion.token_ids, temperature), strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_tiny_qwen3(tmp_path_factory.mktemp("tiny"))
    engine = VllmEngine(str(folder), dtype="float32", max_model_len=256, max_num_seqs=64, kv_cache_mb=32, gpu_memory_utilization=0.5,
                        threads=1, weight_version=7)
    yield Served(engine, load_tiny_qwen3(folder))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate([5], sampling()))


def sampling(seed: int = 0, *, temperature: float = 1.0, max_tokens: int = 12, stop: tuple[int, ...] = (STOP,)) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop, seed=seed)


def contexts(count: int, *, seed: int = 0, least: int = 5, most: int = 100) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(4, VOCAB) for _ in range(generator.randint(least, most))] for _ in range(count)]


def sample(engine: VllmEngine, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[Completion]:
    """All requests at once."""

    async def together() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(context, params) for context, params in requests)))

    return asyncio.run(together())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(served: Served, temperature: float) -> None:
    prompts = contexts(16)
    completions = sample(served.engine, [(prompt, sampling(seed, temperature=temperature)) for seed, prompt in enumerate(prompts)])
    assert served.gap(prompts, completions, temperature) < 1e-5
    assert {completion.weight_version for completion in completions} == {served.engine.weight_version}


def test_greedy_takes_the_best_token_and_reports_the_models_logprob(served: Served) -> None:
    prompts = contexts(4, seed=1)
    # A sampled request in the same batch takes vLLM's other code path; the greedy ones must not notice.
    completions = sample(served.engine, [(prompt, sampling(temperature=0.0)) for prompt in prompts] + [(prompts[0], sampling(1))])[:4]
    assert served.gap(prompts, completions) < 1e-5
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = served.model(torch.tensor([prompt])).logits[0, -1]
        assert completion.token_ids[0] == int(logits.argmax())


def test_the_seed_decides_the_response(served: Served) -> None:
    (prompt,) = contexts(1, seed=2)
    first, again, other = (sample(served.engine, [(prompt, sampling(seed))])[0] for seed in (11, 11, 12))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_a_batch_samples_what_each_request_samples_alone(served: Served) -> None:
    requests = [(prompt, sampling(seed)) for seed, prompt in enumerate(contexts(40, seed=3))]
    together = [completion.token_ids for completion in sample(served.engine, requests)]
    alone = [sample(served.engine, [request])[0].token_ids for request in requests]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 0.99 * len(requests)


def test_siblings_share_their_context_in_the_cache_and_differ(served: Served) -> None:
    (prompt,) = contexts(1, seed=4, least=70, most=70)
    completions = sample(served.engine, [(prompt, sampling(seed)) for seed in range(8)])
    assert [completion.cached_prompt_tokens for completion in completions] == [0] + [64] * 7  # blocks of 32 tokens
    assert [completion.shareable_prompt_tokens for completion in completions] == [0] + [64] * 7
    assert len({completion.token_ids for completion in completions}) == 8
    assert served.gap([prompt] * 8, completions) < 1e-5


def test_the_cache_answers_all_that_it_could_over_the_turns_of_siblings(served: Served) -> None:
    """Also what a response computed, but for its last token; a push ends it."""
    async def play(context: list[int], seed: int) -> list[Completion]:
        turns = []
        for turn in range(3):
            turns.append(await served.engine.generate(context, sampling(1000 * seed + turn, max_tokens=30, stop=())))
            context = [*context, *turns[-1].token_ids, *range(10, 17)]
        return turns

    async def together() -> list[list[Completion]]:
        return list(await asyncio.gather(*(play(context, 10 * i + j) for i, context in enumerate(starts) for j in range(4))))

    starts = contexts(6, seed=12, least=40, most=100)
    for pushed in (False, True):
        if pushed:
            served.push(seed=40)
        episodes = asyncio.run(together())
        found = [(one.cached_prompt_tokens, one.shareable_prompt_tokens) for turns in episodes for one in turns]
        assert all(cached == shareable for cached, shareable in found)
        for number, (first, second, third) in enumerate(episodes):
            length = len(starts[number // 4])
            least = 0 if number % 4 == 0 else (length - 1) // 32 * 32
            assert (first.shareable_prompt_tokens == least) or not pushed  # before the push, other tests may have had it
            assert (second.shareable_prompt_tokens, third.shareable_prompt_tokens) == ((length + 29) // 32 * 32, (length + 66) // 32 * 32)


def test_seeds_draw_from_the_models_distribution_and_log_probabilities_are_those_of_the_stock_sampler(served: Served) -> None:
    """Chi-square of 2,000 first tokens, of as many seeds, against transformers' probabilities."""
    (prompt,) = contexts(1, seed=11)
    requests = [(prompt, sampling(seed, temperature=0.3, max_tokens=1, stop=())) for seed in range(2000)]
    drawn = sample(served.engine, requests)
    expected = torch.softmax(served.model(torch.tensor([prompt])).logits[0, -1].double() / 0.3, dim=-1).detach()
    top = expected.topk(8).indices.tolist()
    shares = 2000 * torch.tensor([*(expected[token].item() for token in top), 1 - expected[top].sum().item()])
    assert (shares > 20).all()  # or chi-square would not hold
    counts = Counter(one.token_ids[0] for one in drawn)
    observed = torch.tensor([*(float(counts[token]) for token in top), float(2000 - sum(counts[token] for token in top))])
    assert ((observed - shares) ** 2 / shares).sum() < 26.1  # 8 degrees of freedom: 1 in 1,000

    sampler = served.engine._llm.collective_rpc(lambda worker: worker.model_runner.sampler.topk_topp_sampler)[0]
    known, ours, sampler.forward = {one.token_ids[0]: one.logprobs[0] for one in drawn}, sampler.forward, sampler.stock
    stock = sample(served.engine, requests[:200])
    sampler.forward = ours
    both = [one for one in stock if one.token_ids[0] in known]
    assert len(both) > 100 and all(abs(one.logprobs[0] - known[one.token_ids[0]]) < 1e-5 for one in both)
    assert [one.token_ids for one in stock] != [one.token_ids for one in drawn[:200]]  # or it was not the stock one


def test_the_stop_token_is_part_of_the_response(served: Served) -> None:
    (prompt,) = contexts(1, seed=5)
    free = sample(served.engine, [(prompt, sampling(5, stop=()))])[0]
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    stop = free.token_ids[4]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    stopped = sample(served.engine, [(prompt, sampling(5, stop=(stop,)))])[0]
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", expected)


def test_weight_pushes_change_everything_including_the_tied_head(served: Served) -> None:
    prompts = contexts(8, seed=6) + contexts(1, seed=6, least=200, most=200)
    requests = [(prompt, sampling(seed, max_tokens=8)) for seed, prompt in enumerate(prompts)]
    sample(served.engine, requests)  # fills the prefix cache with the first weights
    assert sample(served.engine, requests)[-1].cached_prompt_tokens == 192
    for push in range(3):
        version = served.engine.weight_version + 1
        before = sample(served.engine, requests)
        served.push(seed=push)
        completions = sample(served.engine, requests)
        assert served.gap(prompts, completions) < 1e-5
        assert served.gap(prompts, before) > 0.1  # or the push would have shown nothing
        assert {completion.weight_version for completion in completions} == {version}
        assert completions[-1].cached_prompt_tokens == 0


def broken(served: Served, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights with one fault."""
    for name, tensor in served.model.state_dict().items():
        if name == "model.layers.1.self_attn.v_proj.weight":  # part of a fused parameter, of which vLLM would not miss it
            if kind == "missing":
                continue
            if kind == "interrupted":
                raise ConnectionError("sender is gone")
            if kind == "misshapen":
                tensor = tensor[:-1]
        yield name, tensor
    if kind == "unknown":
        yield "model.layers.2.self_attn.v_proj.weight", torch.zeros(1)


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", r"1 missing \(model.layers.1.self_attn.v_proj.weight\)"),
    ("unknown", r"1 unknown \(model.layers.2.self_attn.v_proj.weight\)"),
    ("interrupted", "sender is gone"),
    ("misshapen", "could not be loaded"),
])
def test_a_bad_push_stops_sampling_until_a_complete_one(served: Served, kind: str, message: str) -> None:
    version = served.engine.weight_version
    perturb(served.model, seed=20)
    with pytest.raises(EngineError, match=message):
        served.engine.load_weights(broken(served, kind), version + 1)
    assert served.engine.weight_version == version
    prompts = contexts(4, seed=7)
    requests = [(prompt, sampling(seed)) for seed, prompt in enumerate(prompts)]
    with pytest.raises(EngineError, match="push all weights again"):
        sample(served.engine, requests)
    served.push(seed=21)
    assert served.gap(prompts, sample(served.engine, requests)) < 1e-5


def test_weights_are_refused_while_requests_are_open(served: Served) -> None:
    (prompt,) = contexts(1, seed=8)
    version = served.engine.weight_version

    async def push_early() -> Completion:
        request = asyncio.create_task(served.engine.generate(prompt, sampling()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests are open"):
            served.engine.load_weights(served.model.state_dict().items(), version + 1)
        return await request

    completion = asyncio.run(push_early())
    assert completion.weight_version == served.engine.weight_version == version
    assert served.gap([prompt], [completion]) < 1e-5


@pytest.mark.parametrize(("context", "params", "message"), [
    ([5] * 250, sampling(max_tokens=7), "250 tokens .* max_tokens 7 exceeds max_model_len 256"),
    ([], sampling(), "0 tokens"),
    ([5], sampling(temperature=0.001), "temperature 0.001"),
    ([5], sampling(temperature=-1.0), "refused.*temperature"),
    ([5, VOCAB], sampling(), "token ids 5 to 1024; expected 0 to 1023"),
    ([5], sampling(stop=(VOCAB,)), "refused.*1024"),
])
def test_impossible_requests_are_refused_alone(served: Served, context: list[int], params: Sampling, message: str) -> None:
    async def beside_a_good_one() -> Completion:
        good = asyncio.create_task(served.engine.generate([5] * 244, sampling()))
        with pytest.raises(EngineError, match=message):
            await served.engine.generate(context, params)
        return await good

    assert asyncio.run(beside_a_good_one()).token_ids


def test_a_failing_step_reaches_every_waiting_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.engine

    async def lose_three() -> list[Any]:
        calls = [asyncio.create_task(engine.generate(prompt, sampling())) for prompt in contexts(3, seed=9)]
        await asyncio.sleep(0)
        open_ids = list(engine._open)
        with monkeypatch.context() as patch:
            patch.setattr(engine._llm.engine_core, "get_output", lambda: 1 / 0)
            errors = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineError, match="must be replaced: division by zero"):
            await engine.generate([5], sampling())
        engine._llm.abort_request(open_ids, internal=True)
        return errors

    for error in asyncio.run(lose_three()):
        assert isinstance(error, EngineError) and "lost 3 requests: ZeroDivisionError" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
    engine._failure = None  # only this test knows that vLLM itself is sound


def test_cancelling_frees_the_request_and_leaves_the_others_alone(served: Served) -> None:
    prompts = contexts(2, seed=10)

    async def cancel_one() -> Completion:
        doomed = asyncio.create_task(served.engine.generate(prompts[0], sampling(max_tokens=150, stop=())))
        kept = asyncio.create_task(served.engine.generate(prompts[1], sampling(max_tokens=60, stop=())))
        for _ in range(20):
            await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert served.engine._llm.get_num_unfinished_requests() == 1
        return await kept

    assert served.gap([prompts[1]], [asyncio.run(cancel_one())]) < 1e-5
    assert served.engine._llm.get_num_unfinished_requests() == 0
    served.push(seed=30)


def test_a_finished_turn_continues_while_others_still_sample(served: Served) -> None:
    finished: list[str] = []

    async def episode(name: str, turns: int, tokens: int) -> None:
        for _ in range(turns):
            await asyncio.wait_for(served.engine.generate([5, 6], sampling(max_tokens=tokens, stop=())), timeout=30)
        finished.append(name)

    async def together() -> None:
        await asyncio.gather(episode("one long turn", 1, 100), episode("five short turns", 5, 10))

    asyncio.run(together())
    assert finished == ["five short turns", "one long turn"]
