"""The prose of docs/results.md; its numbers are computed from the results."""

from __future__ import annotations

import re
import textwrap

from claims import NOISE, Known

PREFACE = f"""# Results

This page is written by `python bench/write_results.py` from the raw results in `bench/results`.

**Set-up of the quality runs.** A Llama-style decoder of 12M parameters (6 blocks of width 384, context 512), 64 MB of
English novels, a BPE of 4,096. Whole novels are held out: 17.4M tokens to train on, so that 50M tokens are nearly three
passes, and 262k held-out tokens that no run has seen. 32,768 tokens a step over all workers, so that with $M$ workers
each takes an $M$-th of every batch; the same tokens in the same order for all. AdamW or Muon with a cosine, clip 1. The
inner learning rate was tuned for DDP and is the same for all methods: none was tuned for itself.

**How to read it.** Loss is in nats a token, of the model a user would export (`fleet.finish()`). "Against DDP" is
against DDP with the same inner optimizer and tokens, at the best rate tried. There is *one seed*: the spread between
seeds was not measured, and {NOISE}% is taken for noise without proof. Settings were chosen by the same held-out loss
that is reported. The model is small and the runs are short; both make methods that meet seldom look worse than in the
papers.

"""

KEPT = """### A table at 1000x, written by hand

No method was added for 1000x: with AdamW `tw.sparseloco(16, topk=148)` is the best of what was tried, and it is there
already. With Muon inside, "kept" lost less: the strongest values travel in two bits, what is not sent stays in the live
parameters (`tw.Carry`) instead of a residual, and there is no outer momentum. It is one row:

```python
import thinwire as tw


def kept(every, topk, chunk=4096):
    codec = tw.TopK(topk, chunk, values=tw.TwoBit())
    return tw.table("kept", tw.Sync(tw.params, tw.Every(every), tw.Carry(tw.SGD(1.0)), codec), every=every)


thousand = kept(every=8, topk=74)  # 1000x fewer bytes than DDP
```
"""

NOT_LISTED = """## Not run

Beside what the tables above say:

- 100M tokens and second seeds for the runs that carry a claim; the 35M shape; periods of 30 and 100; WikiText-2 as a
  second test set; a sweep of outer learning rates (momentum .6 and .9 at rate .7 only).
- DES-LOC with ADOPT or Muon, newcomers, DiLoCo at 256.
- Eager with two phases, with E3M0, at lower rates; delayed at a lower rate; one inner step of overlap.
- Decoupled momentum at H = 128 with 2 and 8 workers and with "paper"; a ResNet on Fashion-MNIST or CIFAR-10. A small
  CNN on scikit-learn's digits stands in (`LOG.md`, `bench/results/decoupled_cnn.json`).
- At 1000x: MT-DAO-style slow momentum, DES-LOC rows below fp32, sparseloco at 3000x, anything at more than 25M tokens.
- The engine's overhead at 1B parameters (memory at 1B was measured); codecs on a CPU as a recorded file.
"""


LESSONS = """\
**Overlap.** Relay (`tw.relay_diloco`) reaches the goals: <M2 relay .6 : M2 diloco .6>, <M4 relay .6 : M4 diloco .6>
and <M8 relay .6 : M8 diloco .6> against DiLoCo with the same outer step at 2, 4 and 8 workers, where eager loses <M2
eager : M2 diloco>, <M4 eager : M4 diloco> and <M8 eager : M8 diloco>. What it is made of, at four workers:

- *Short delays.* Fragments whose answers are a whole period old: <M4 relay, full delay : M4 diloco .6>; the whole
  model, a period old (carry): <M4 carry : M4 diloco .6>. So relay keeps the line busy all the time, but does not
  hide a *latency* of a whole period.
- *Less outer momentum.* Relay with .9: <M4 relay : M4 relay .6> more. This is not about overlap: DiLoCo's own
  default of .9 is the larger problem at this scale. With .6 DiLoCo's loss changes by <M2 diloco .6 : M2 diloco>, <M4
  diloco .6 : M4 diloco> and <M8 diloco .6 : M8 diloco> at 2, 4 and 8 workers, and most of it is lost early: plain
  averaging for the first 256 of 1,536 steps and .9 after them gives <M4 diloco, averaged at first : M4 diloco>. The
  inner learning rate may have a part in it: in the earlier runs, at half the rate, DiLoCo with .9 was <earlier M4
  diloco : earlier ddp> above DDP at four workers, here it is <M4 diloco : ddp>.
- *Keeping local progress* instead of streaming's mix: not shown to help. The same fragments and delay with mix .5
  and momentum .9 gave <M4 relay, mixed : M4 relay .6>. It was run at four workers only.
- *Forecast*, a rule on trial that moves the own progress towards the last mean, is the best with answers a whole
  period old: <M4 forecast : M4 diloco .6>. One run, one setting, one number of workers: it is in
  `bench/forecast.py`, not in the library.
- Tried and of little use: a start without delay for carry (<M4 carry, start without delay : M4 carry>); less
  momentum for eager at rate .7, which still ends <M4 eager .6 : M4 diloco .6> above DiLoCo.

**1000x fewer bytes within 1% of DDP was not reached.** The best is <1000x sparseloco 16 : rate adamw 2e-3> with
AdamW (sparseloco) and <muon 1000x kept 8 : rate muon 4e-3> with Muon ("kept" below, in absolute loss the lowest of
all at 1000x with <muon 1000x kept 8>). Much of it is not compression: averaging in fp32 with all moments every 16
steps (Local Adam) is already <local adam 16 : rate adamw 2e-3> above DDP, and DiLoCo at its defaults, with 30 times
the bytes, <25M diloco 32 : rate adamw 2e-3>. What each part did, AdamW, four workers:

- The residual kept in the live parameters ("kept") instead of beside them (sparseloco), every 16: <1000x kept 16 :
  1000x sparseloco 16>; with Muon <muon 1000x kept 16 : muon 1000x sparseloco 16>.
- Shorter periods with fewer values each: every 32 <1000x kept 32>, 16 <1000x kept 16>, 8 <1000x kept 8>, 4 <1000x
  kept 4>.
- To kept, every 16: the mean over all instead of over the senders <1000x kept 16, mean of all : 1000x kept 16>, a
  DCT <1000x kept 16, DCT : 1000x kept 16>, overlap by a period <1000x kept 16, overlapped : 1000x kept 16>.
- Dense codecs with longer periods: E3M0 every 128 <1000x E3M0 128 : rate adamw 2e-3> above DDP, two bits with
  residual every 64 <1000x two bits 64 : rate adamw 2e-3> (<muon 1000x two bits 64 : rate muon 4e-3> with Muon), all
  with outer momentum .9. Decoupled momentum every 16: <1000x decoupled 16 : rate adamw 2e-3>.

At 3000x the best is <3000x kept 24 : rate adamw 2e-3> with AdamW and <muon 3000x kept 24 : rate muon 4e-3> with
Muon. Muon's best rate is the highest that was tried, so its DDP may be better still, and the gaps larger.

**DES-LOC** at half the bytes of Local Adam: <desloc 16 : local adam 16> at Kx = 16, <desloc 32 : local adam 32> at
32, <desloc 256 : local adam 256> at 256. At 256 the test is weak: in 1,536 steps the first moments meet twice and
the second once. At 32 it is no better than moments that are left local (<states local 32 : desloc 32>), which send a
third less. Nesterov (1, .9) on the mean drift costs <desloc 32 nesterov : desloc 32>: the same momentum as above.

**Decoupled momentum** lies between DiLoCo at 128 and at 512, with two orders of magnitude fewer bytes. The bracket
is wide: DiLoCo at 512 meets three times in this run and gets worse at the last meeting (see its curve in the raw
file: 4.12 before it, <diloco 512> after). Both variants are below the better of the two as well. Against DiLoCo at
128 "consensus" loses <decoupled 128 consensus : diloco 128>, "mean" <decoupled 128 mean : diloco 128>; for "mean"
that is worker 0's copy, and the mean of its workers is far worse.

**Speed.** A round in at most .6 of torchft's time was wanted. It holds with 1,000 tensors against torchft, and with
10 and 100 against torchft's buckets; it does not with 10 and 100 against torchft without buckets, nor with 1,000
against its buckets. DCT + top-k, encoded and merged, takes 35 to 38 times less time on a GPU than the per-tensor
approach in the same run; that approach is bound by its launches, and so by the host.
"""


def flow(text: str) -> str:
    """Every paragraph and every point of a list in lines of one width, whatever the numbers in it."""
    return "\n\n".join("\n".join(map(_fill, re.split(r"\n(?=- )", part))) for part in text.strip().split("\n\n"))


def _fill(part: str) -> str:
    indent = "  " if part.startswith("- ") else ""
    words = " ".join(part.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def filled(text: str, known: Known) -> str:
    """`<run : base>` becomes the gap of their losses in percent, `<run>` its loss.

    >>> filled("<a : b>, <a>", Known({"a": {"finished": 3.0}, "b": {"finished": 2.0}}))
    '+50.0%, 3.0000'
    """

    def number(found: re.Match[str]) -> str:
        run, *base = (" ".join(name.split()) for name in found[1].split(" : "))
        if not base:
            return f"{known.loss(run):.4f}"
        gap = known.gap(run, base[0])
        return f"{gap:+.2f}%" if abs(gap) < 1 else f"{gap:+.1f}%"

    return re.sub(r"<([^<>]+)>", number, re.sub(r"\s+:\s+", " : ", text))


def lessons(known: Known) -> str:
    return f"## What the runs say\n\n{flow(filled(LESSONS, known))}\n"
