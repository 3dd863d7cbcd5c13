"""The notebook API on a random model with a made tokenizer, on SmolLM2, and the example notebook, executed."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from tokenizers import Tokenizer, models, pre_tokenizers

import spark_model
from spark_model.errors import ModelError, ModelNotFoundError
from spark_model.notebook import LoadedModel
from spark_model.testing import create_tiny_model, hf_logits, relative_difference
from spark_runtime.types import SamplingParams

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}<assistant>"


@pytest.fixture(scope="module")
def oracle() -> Any:
    return create_tiny_model("Qwen3ForCausalLM", head_dim=32, eos_token_id=95)


def save_model(oracle: Any, path: Path, template: str | None) -> None:
    """The model with a tokenizer whose word `wN` is token N."""
    oracle.save_pretrained(path)
    vocabulary = {f"w{index}": index for index in range(90)} | {"<user>": 90, "<assistant>": 91, "<system>": 92}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(path / "tokenizer.json"))
    config = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("chat")
    save_model(oracle, path, TEMPLATE)
    return spark_model.load(str(path))


def greedy_words(oracle: Any, tokens: list[int], count: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < count:
        token = int(hf_logits(oracle, tokens + drawn)[-1].argmax())
        if token == 95:
            break
        drawn.append(token)
    return drawn


def test_generate_applies_the_chat_template(model: LoadedModel, oracle: Any) -> None:
    assert model.encode_prompt("w1 w2") == [90, 1, 2, 91]
    wanted = model.tokenizer.decode(greedy_words(oracle, [90, 1, 2, 91], 6))
    assert wanted
    assert model.generate("w1 w2", max_tokens=6) == wanted
    assert model.generate([{"role": "user", "content": "w1 w2"}], max_tokens=6) == wanted
    assert model.chat([{"role": "user", "content": "w1 w2"}], max_tokens=6) == wanted


def test_generate_raw_takes_the_text_as_it_is(model: LoadedModel, oracle: Any) -> None:
    assert model.encode_prompt("w1 w2", raw=True) == [1, 2]
    wanted = model.tokenizer.decode(greedy_words(oracle, [1, 2], 6), at_start=False)
    assert model.generate("w1 w2", max_tokens=6, raw=True) == wanted


def test_generate_samples_by_seed(model: LoadedModel) -> None:
    texts = {model.generate("w1", max_tokens=8, temperature=1.5, seed=seed) for seed in range(4)}
    assert len(texts) > 1
    assert model.generate("w1", max_tokens=8, temperature=1.5, seed=3) in texts


def test_generate_stops_at_the_context_length(oracle: Any, tmp_path: Path) -> None:
    save_model(oracle, tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10, "eos_token_id": None}))
    model = spark_model.load(str(tmp_path))
    assert len(model._generate_ids([1, 2, 3], 100, SamplingParams(temperature=0.0))) == 7
    with pytest.raises(ModelError, match="a sequence of 11 tokens; the model takes 1 to 10 tokens"):
        model.generate(" ".join(["w1"] * 11))


def test_generate_conversation_without_a_template_is_refused(oracle: Any, tmp_path: Path) -> None:
    save_model(oracle, tmp_path, None)
    model = spark_model.load(str(tmp_path))
    assert model.encode_prompt("w1 w2") == [1, 2]
    with pytest.raises(ModelError, match="the model has no chat template"):
        model.chat([{"role": "user", "content": "w1"}])


def test_generate_raw_conversation_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ModelError, match="got raw=True"):
        model.generate([{"role": "user", "content": "w1"}], raw=True)


def test_forward_logits_equal_transformers(model: LoadedModel, oracle: Any) -> None:
    tokens = [5, 17, 3, 80, 2] * 8
    result = model.forward(tokens)
    assert relative_difference(result.logits, hf_logits(oracle, tokens)) < 1e-4
    assert [tuple(hidden.shape) for hidden in result.hidden_states] == [(40, 64)] * 3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "a sequence of 0 tokens"), ([96], "token id 96 is outside the vocabulary of 96"), ([-1], "token id -1")],
)
def test_forward_refuses_ids_that_are_none(model: LoadedModel, tokens: list[int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model.forward(tokens)


def test_load_unknown_name_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        spark_model.load("no-such-model")


def test_load_smollm2_answers() -> None:
    model = spark_model.load("smollm2")
    assert model.generate("What is the capital of France?", max_tokens=16) == "The capital of France is Paris."


def test_example_notebook_runs_and_is_stored_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in code]
    assert printed[1] == "The capital of France is Paris.\n"
    assert " Paris" in printed[3]
    assert len(printed[4].splitlines()) == 30


def test_module_leaves_grad_mode_alone(model: LoadedModel) -> None:
    model.forward([1, 2])
    assert torch.is_grad_enabled()
