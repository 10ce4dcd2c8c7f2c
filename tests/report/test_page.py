"""The page of a run and of a comparison, opened in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.train.conftest import arguments_of, begin, ended, metrics, write_text
from thinwire import methods

plotly = pytest.importorskip("plotly")

from thinwire.report import figures  # noqa: E402 (needs plotly)
from thinwire.report import page as pages  # noqa: E402
from thinwire.train.errors import UserError  # noqa: E402

METHODS = ("ddp", "desloc", "diloco")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three methods, with its report."""
    folder = tmp_path_factory.mktemp("compare")
    out = folder / "out"
    sets = arguments_of(write_text(folder))
    result = ended(
        begin("compare", "--methods", ",".join(METHODS), *sets, "--steps", 12, "--workers", 2, "--out", out, cwd=folder)
    )
    assert all(name in result.stdout for name in (*METHODS, "report.html"))
    return out


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page as the browser ends up with it, and what was written to its console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    quiet = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
    )
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [
        browser,
        *quiet,
        *flags,
        offline,
        f"--user-data-dir={profile}",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    return result.stdout, [line for line in result.stderr.splitlines() if ":CONSOLE" in line]


def test_compare_puts_methods_side_by_side(compared: Path) -> None:
    results = json.loads((compared / "compare.json").read_text())
    assert [entry["method"] for entry in results] == list(METHODS)
    by_name = {entry["method"]: entry for entry in results}
    assert by_name["ddp"]["bytes_vs_ddp"] == 1.0
    assert by_name["diloco"]["bytes_sent"] < by_name["desloc"]["bytes_sent"] < by_name["ddp"]["bytes_sent"]
    for entry in results:
        assert {"loss", "perplexity", "bytes_sent", "seconds", "tokens", "parameters"} <= entry.keys()
        lines = metrics(compared / entry["run"])
        assert len(lines) == 12 and lines[0]["loss"] == metrics(compared / "ddp")[0]["loss"], "the same first batch"


@pytest.mark.parametrize("which", ["comparison", "run"])
def test_the_page_opens_offline_without_a_complaint(compared: Path, thinwire, tmp_path: Path, which: str) -> None:
    folder = compared if which == "comparison" else compared / "diloco"
    if which == "run":
        assert str(folder / "report.html") in thinwire("report", folder).stdout
    page = folder / "report.html"
    dom, complaints = browse(page, tmp_path / "profile")
    assert complaints == []
    for chart in ("loss", "pareto", "timeline", *pages.DRIFTS):
        assert f'id="{chart}"' in dom
    assert dom.count('class="main-svg"') >= 5, "every chart was drawn"
    for said in (
        "diloco",
        "steps</text>",
        "tokens</text>",
        "bytes</text>",
        "[optimizer]",
        "Perplexity",
        "evaluate the consensus",
    ):
        assert said in dom
    assert "<script src" not in page.read_text(), "a self-contained file; the browser has no network here"


PROBE = """<script>setTimeout(() => {
  const colour = (query, what) => getComputedStyle(document.querySelector(query))[what];
  document.title = [colour("body", "color"), colour(".xtick text", "fill"), colour(".xgrid", "stroke"),
                    colour("section", "backgroundColor")].join(" | ");
}, 1000)</script></body>"""


@pytest.mark.parametrize(
    ("flags", "colours"),
    [
        ((), "rgb(33, 37, 41) | rgb(52, 58, 64) | rgb(233, 236, 239) | rgb(255, 255, 255)"),
        (("--force-dark-mode",), "rgb(230, 233, 239) | rgb(230, 233, 239) | rgb(44, 51, 64) | rgb(24, 28, 37)"),
    ],
    ids=["light", "dark"],
)
def test_the_page_and_its_charts_go_by_the_readers_preference(
    compared: Path, tmp_path: Path, flags: tuple[str, ...], colours: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text((compared / "report.html").read_text().replace("</body>", PROBE))
    dom, _ = browse(page, tmp_path / "profile", *flags)
    assert f"<title>{colours}</title>" in dom


def test_the_browser_would_have_told(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('seen'); absent()</script>")
    _, complaints = browse(page, tmp_path / "profile")
    assert len(complaints) == 2


def test_a_run_that_goes_on_has_a_page_too(compared: Path, thinwire, tmp_path: Path) -> None:
    """Without its summary, and with half a last line, as a killed run leaves it."""
    run = shutil.copytree(compared / "desloc", tmp_path / "run")
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    thinwire("report", run)
    assert "so far" in (run / "report.html").read_text()


def test_a_run_without_an_exchange_or_a_held_out_part_claims_neither(tmp_path: Path, thinwire) -> None:
    sets = arguments_of(write_text(tmp_path), data__holdout=0, logging__report="true")
    said = thinwire("train", *sets, "--steps", 3, "--workers", 2, "--out", tmp_path / "run").stdout
    assert "training loss" in said and "nothing sent" in said and "inf" not in said and "held-out" not in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "(training)" in page and '<div class="value">1x</div>' not in page


def test_a_damaged_comparison_is_refused_by_name(tmp_path: Path, thinwire) -> None:
    (tmp_path / "compare.json").write_text("[{")
    result = thinwire("report", tmp_path, status=2)
    assert "compare.json is damaged" in result.stderr and len(result.stderr.splitlines()) == 1


def changed(run: Path, target: Path, losses: dict[int, float | None]) -> Path:
    """A copy of a run whose loss had these values at these steps."""
    shutil.copytree(run, target)
    records = [record | {"loss": losses.get(record["step"], record["loss"])} for record in metrics(run)]
    (target / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return target


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_said_where_its_curve_is_missing(
    compared: Path, tmp_path: Path, bad: float | None
) -> None:
    run = changed(compared / "diloco", tmp_path / "run", {7: bad, 8: bad})
    assert "diloco: the loss was not finite at step 7" in pages.write(run).read_text()
    assert "not finite" not in pages.write(compared / "desloc").read_text()


NO_POINT = "Nothing to show: nothing was sent, or no loss was finite after the first exchange."


@pytest.mark.parametrize("bytes_sent", [0, 1000], ids=["before it sent", "before its first exchange"])
def test_loss_against_bytes_of_a_run_without_a_point_is_said_in_words(
    compared: Path, tmp_path: Path, bytes_sent: int
) -> None:
    """The empty chart had an axis of bytes from -1 to 6 that meant nothing."""
    run = shutil.copytree(compared / "diloco", tmp_path / "run")
    (run / "summary.json").unlink()
    records = [record | {"loss": None, "val_loss": None, "bytes_sent": bytes_sent} for record in metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = pages.write(run).read_text()
    assert NO_POINT in text and 'id="pareto"' not in text
    assert NO_POINT not in pages.write(compared / "diloco").read_text()


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_a_run_that_diverged_is_not_the_best(compared: Path, tmp_path: Path, bad: float | None) -> None:
    folder = shutil.copytree(compared, tmp_path / "out")
    summary = json.loads((folder / "ddp" / "summary.json").read_text()) | {"loss": bad}
    (folder / "ddp" / "summary.json").write_text(json.dumps(summary))
    assert '<div class="value">nan</div>' not in pages.write(folder).read_text()


RUN = {"run": "ddp", "label": "ddp"}
SUMMARY = dict.fromkeys(pages.SUMMARY, 1)
RECORD = dict.fromkeys(pages.RECORD, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("compare.json", {}),
        ("compare.json", []),
        ("compare.json", "x"),
        ("compare.json", ["x"]),
        ("compare.json", [{"label": "a"}]),
        ("compare.json", [{"run": 1, "label": "a"}]),
        ("compare.json", [RUN, {"run": "diloco"}]),
        ("ddp/summary.json", "x"),
        ("ddp/summary.json", []),
        ("ddp/summary.json", {}),
        ("ddp/summary.json", SUMMARY | {"bytes_sent": "many"}),
        ("ddp/metrics.jsonl", {"step": 1}),
        ("ddp/metrics.jsonl", RECORD | {"step_seconds": "x"}),
        ("ddp/metrics.jsonl", RECORD | {"val_loss": "x"}),
    ],
)
def test_json_of_another_shape_is_damaged(compared: Path, tmp_path: Path, name: str, content: object) -> None:
    folder = shutil.copytree(compared, tmp_path / "out")
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError, match=f"{re.escape(str(folder / name))} is damaged: ") as refused:
        pages.write(folder)
    assert "\n" not in str(refused.value)


def test_the_folder_one_is_in_has_a_name(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(compared, tmp_path / "mine")
    monkeypatch.chdir(folder)
    assert "Comparison: mine</title>" in pages.write(Path(".")).read_text()
    monkeypatch.chdir(folder / "diloco")
    Path("summary.json").unlink()
    text = pages.write(Path(".")).read_text()
    assert "Run: diloco</title>" in text and "<summary>diloco</summary>" in text, "the name stands for the method's"


def test_images_are_counted_as_images(compared: Path, tmp_path: Path) -> None:
    run = shutil.copytree(compared / "diloco", tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('kind = "llama"', 'kind = "resnet"'))
    text = pages.write(run).read_text()
    assert "images in 12 steps" in text and "Images/s" in text and "images, all workers" in text
    assert "tokens in 12 steps" in pages.write(compared / "diloco").read_text()


def test_many_names_stand_below_the_charts(compared: Path) -> None:
    """Above them the names ran into the buttons; beside them they left a phone no room for the chart."""
    runs = [pages.Run(f"method {number}", metrics(compared / "diloco"), {}, "") for number in range(12)]
    drifts = [figures.drift(runs, key) for key in pages.DRIFTS]
    for figure in (figures.loss(runs), figures.pareto(runs), *drifts):
        legend = figure.layout.legend
        assert (legend.orientation, legend.yref, legend.y, legend.yanchor) == ("h", "container", 0, "bottom")
        named = [trace.name for trace in figure.data if trace.showlegend is not False]
        assert named == [run.label for run in runs]
        assert not [trace for trace in figure.data if trace.text]


def test_every_method_has_a_colour_of_its_own() -> None:
    assert len(set(figures.COLOURS)) == len(figures.COLOURS) >= len(methods.__all__)


def test_the_bytes_of_ddp_are_named_where_their_line_is(compared: Path) -> None:
    figure = figures.pareto([pages._load(compared / "diloco")])
    assert 10 ** figure.layout.annotations[0].x == pytest.approx(figure.layout.shapes[0].x0)
