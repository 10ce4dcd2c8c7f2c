"""The schema: what it prints it reads, what it does not know it refuses with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.train import config as configs
from thinwire.train import toml
from thinwire.train.config import Config
from thinwire.train.errors import UserError
from thinwire.train.methods import build_method, construct, methods, resolved_method
from thinwire.train.models import Llama, Shape


def test_what_is_printed_is_read_back_as_it_was(tmp_path: Path, thinwire) -> None:
    printed = thinwire("train", "--print-config").stdout
    (tmp_path / "printed.toml").write_text(printed)
    read = configs.load(tmp_path / "printed.toml")
    assert toml.dump(read) == printed == toml.dump(Config())


def test_every_printed_key_has_a_comment() -> None:
    lines = [line for line in toml.dump(Config()).splitlines() if line and not line.startswith("[")]
    assert all(line.rpartition("  # ")[2].strip() for line in lines)
    assert len(lines) > 50


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_is_built_from_its_own_printed_section(name: str, tmp_path: Path) -> None:
    config = Config()
    configs.assign(config, "method.name", name)
    (tmp_path / "c.toml").write_text(toml.dump(config))
    read = configs.load(tmp_path / "c.toml")
    assert resolved_method(read.method) == resolved_method(config.method)
    model = Llama(Shape(4, 16, 2, 16), vocabulary=8, context=4)
    assert build_method(read.method, model).name


@pytest.mark.parametrize(
    ("of", "chosen", "then", "kept"),
    [
        ("desloc", "", "carry_diloco", {}),  # a delay of 0 is desloc's default, and another algorithm in carry
        ("demo", "", "sparseloco", {}),
        ("demo", "method.topk=8", "sparseloco", {"topk": 8}),
        ("desloc", "method.every=5", "sparse_averaging", {"every": 5}),
        ("diloco", "method.codec=Int8()", "eager_diloco", {"codec": "Int8()"}),
        ("diloco", "method.codec=Int8()", "desloc", {}),
        ("diloco", "method.codec=Int8()", "diloco", {"codec": "Int8()"}),
    ],
)
def test_another_method_takes_over_what_was_chosen_and_no_default_of_the_last(
    of: str, chosen: str, then: str, kept: dict[str, object], tmp_path: Path
) -> None:
    config = Config()
    configs.assign(config, "method.name", of)
    if chosen:
        configs.override(config, chosen)
    (tmp_path / "every key.toml").write_text(toml.dump(config))
    read = configs.load(tmp_path / "every key.toml")
    configs.assign(read, "method.name", then)
    assert resolved_method(read.method) == resolved_method({"name": then, **kept})


@pytest.mark.parametrize(("text", "value"), [("outer_lr=.5", 0.5), ("outer_lr=1", 1.0), ("codec=None", None)])
def test_a_methods_value_from_a_command_line(text: str, value: object) -> None:
    config = Config()
    configs.assign(config, "method.name", "diloco")
    configs.override(config, "method.codec=Int8()")
    configs.override(config, f"method.{text}")
    assert resolved_method(config.method)[text.partition("=")[0]] == value


def test_only_what_has_no_value_by_default_can_be_unset() -> None:
    with pytest.raises(UserError, match="number"):
        configs.override(Config(method={"name": "diloco"}), "method.outer_lr=None")


def test_objects_are_written_as_constructor_calls() -> None:
    config = Config()
    for text in (
        "method.name=streaming_diloco",
        "method.codec=DCT(TopK(8, values=BFloat16()), 16)",
        "method.fragments=2",
    ):
        configs.override(config, text)
    assert "DCT" in str(build_method(config.method, Llama(Shape(4, 16, 2, 16), 8, 4)))


@pytest.mark.parametrize("name", ["eager_diloco", "relay_diloco", "streaming_diloco"])
def test_fragments_may_be_lists_of_names(name: str) -> None:
    config = Config(method={"name": name})
    configs.override(config, 'method.fragments=[["model.layers.0.*"], ["model.[!l]*", "model.layers.1.*"]]')
    assert "model.layers.0.*" in toml.dump(config)
    build_method(config.method, Llama(Shape(2, 16, 2, 16), vocabulary=8, context=4))


@pytest.mark.parametrize("text", ["__import__('os')", "Int8().x", "TopK(open('f'))", "Int9()", "TopK(", "TopK()"])
def test_a_value_is_never_run_as_code(text: str) -> None:
    with pytest.raises(UserError):
        construct(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimiser.lr=1", "optimizer.lr"),
        ("train.bach=1", "train.batch"),
        ("method.evry=1", "every"),
        ("method.name=deslok", "desloc"),
        ("model.kind=lama", "llama"),
        ("train.batch=two", "int"),
        ("train.batch=0", "1 or more"),
        ("optimizer.lr=fast", "number"),
        ("method.every=2.5", "int"),
        ("nonsense", "key=value"),
        ("optimizer.lr=nan", "finite"),
        ("optimizer.lr=inf", "finite"),
        ("optimizer.betas=0.9", "2 numbers"),
        ("optimizer.betas=[0.9, 0.95, 0.99]", "2 numbers"),
        ("optimizer.betas=[0.9, 1.5]", "below 1"),
        ("data.holdout=1", "below 1"),
        ("data.holdout=1.5", "below 1"),
        ("seed=99999999999", "below"),
        ("name=adamw", "several sections"),
        ("data.vocabulary=99999999999", "below"),
        ("method.codec=Int8()", "method 'desloc' has no key 'codec'"),
        ("method.outer.lr=1", "unknown config key"),
    ],
)
def test_what_is_wrong_is_said_with_a_hint(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        configs.override(Config(), text)


@pytest.mark.parametrize(
    ("method", "text", "said"),
    [
        ("diloco", "codec=8", "a codec such as"),
        ("diloco", "codec=Nesterov(.7, .9)", "a codec such as"),
        ("diloco", "codec=DCT(32)", "as in DCT"),
        ("diloco", "codec=DCT(TopK(8), 64.5)", "64.5"),
        ("diloco", "codec=TopK(8, values=3)", "dense codec"),
        ("desloc", "outer=Int8()", "Nesterov"),
        ("demo", "values=[]", "BFloat16"),
        ("carry_diloco", "delay=soon", "int"),
        ("eager_diloco", "fragments=1.5", "lists of parameter names"),
        ("eager_diloco", "fragments=['*']", "lists of parameter names"),
        ("diloco", "outer_lr=nan", "finite"),
    ],
)
def test_a_methods_value_of_the_wrong_kind_is_refused(method: str, text: str, said: str) -> None:
    config = Config()
    configs.assign(config, "method.name", method)
    with pytest.raises(UserError, match=said):
        configs.override(config, f"method.{text}")
        build_method(config.method, Llama(Shape(2, 16, 2, 16), vocabulary=8, context=4))


def test_a_bare_name_will_do_where_it_is_the_only_one() -> None:
    config = Config()
    configs.override(config, "lr=0.25")
    configs.override(config, "batch=3", local_only=True)
    assert (config.optimizer.lr, config.train.batch) == (0.25, 3)


def test_a_name_may_be_a_number() -> None:
    config = Config()
    for text in ("model.preset=20", "data.files=2026", "data.dataset=7"):
        configs.override(config, text)
    assert (config.model.preset, config.data.files, config.data.dataset) == ("20", ["2026"], "7")


def test_local_keys_are_those_of_one_machine() -> None:
    with pytest.raises(UserError, match="all workers must agree"):
        configs.override(Config(), "optimizer.lr=1", local_only=True)
    one, other = Config(), Config()
    configs.override(other, "train.batch=2", local_only=True)
    assert configs.shared(one) == configs.shared(other)
    configs.override(other, "optimizer.lr=1")
    assert configs.shared(one) != configs.shared(other)


def test_another_method_drops_the_keys_it_does_not_have() -> None:
    config = Config(method={"name": "desloc", "every": 8, "moments": {"exp_avg": 16}})
    configs.assign(config, "method.name", "diloco")
    assert config.method == {"name": "diloco", "every": 8}


def test_a_method_on_any_module_with_blocks() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert build_method({"name": "streaming_diloco", "every": 4}, model)
    assert torch.is_tensor(model[0].weight)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--method", "deslok"), "desloc"),
        (("train", "--set", "data.files=absent.txt"), "absent.txt"),
        (("train", "--steps", "none"), "steps"),
        (("train", "--workres", "2"), "--workers"),
        (("train", "--connect", "127.0.0.1:1"), "--worker"),
        (("compare", "--methods", "ddp,deslok"), "desloc"),
        (("compare", "--methods", "ddp,desloc", "--set", "method.evry=4"), "every"),
        (("train", "--connect", "127.0.0.1:99999", "--worker", "0", "--workers", "2"), "HOST:PORT"),
        (("train", "--set", "train.device=mps"), "auto, cpu"),
        (("report", "absent"), "absent"),
        (("trian",), "trian"),
    ],
)
def test_bad_input_is_one_line_and_status_2(thinwire, arguments: tuple[str, ...], said: str) -> None:
    result = thinwire(*arguments, status=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr
