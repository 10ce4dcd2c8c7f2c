"""The prose of docs/results.md; its numbers are computed from the results."""

from __future__ import annotations

from statistics import median

from fill import filled, flow
from known import Known

TITLE = """# Results

What was measured, claim by claim. Written by `python bench/write_results.py` from the raw files in `bench/results`;
[every run](results/runs.md) and [every speed table](results/speed.md) have pages of their own. Quality is of a 12M
decoder on novels, on a GPU, and again of tiny models on a CPU; [how](#set-up).
"""

IN_SHORT = """\
- **DES-LOC** sends <sent of desloc 256> less than DDP at a period of 256 for <desloc 256 : ddp> of loss, and half of
  what Local Adam sends for <desloc 32 : local adam 32> and <desloc 32, seed 1 : local adam 32, seed 1> (two seeds, a
  period of 32; at 256 <desloc 256 : local adam 256> and <desloc 256, seed 1 : local adam 256, seed 1>): a little worse,
  by about what another seed changes. Moments that never meet do nearly as well at this scale.
- **Eager** updates hide the line at two workers for the published price (<M2 H30 eager : M2 H30 diloco .4> and <M2 H30
  eager, seed 1 : M2 H30 diloco .4, seed 1> against DiLoCo; 2.3% is published), not at four (<M4 H30 eager : M4 H30
  diloco .4>). Ours, `tw.relay_diloco`, costs <M2 relay .6 : M2 diloco .6>, <M4 relay .6 : M4 diloco .6> and <M8 relay
  .6 : M8 diloco .6> at 2, 4 and 8 workers.
- **Decoupled momentum** claims 16 times fewer bytes than DiLoCo at 128. With 256 of 4,096 components, 18 times fewer,
  "consensus" has DiLoCo's loss at 128: <M2 decoupled 128 consensus, 256 : M2 diloco 128>, <decoupled 128 consensus, 256
  : diloco 128> and <M8 decoupled 128 consensus, 256 : M8 diloco 128> at 2, 4 and 8 workers (second seed <M2 decoupled
  128 consensus, 256, seed 1 : M2 diloco 128, seed 1>, <decoupled 128 consensus, 256, seed 1 : diloco 128, seed 1>, <M8
  decoupled 128 consensus, 256, seed 1 : M8 diloco 128, seed 1>), <sent of decoupled 128
  consensus, 256> fewer bytes than DDP. With the published 32, 146 times fewer than DiLoCo, it mostly lies between
  DiLoCo at 128 and at 512. As printed ("paper") it diverges from four workers on.
- **1000 times fewer bytes than DDP within 1% of its loss** is met with Muon from 50M tokens on (`tw.two_bit_averaging`:
  <muon 50M two bits 64, outer 1.5 : muon 50M ddp> and <muon 50M two bits 64, outer 1.5, seed 1 : muon 50M ddp, seed 1>,
  two seeds; with an outer rate of 1 <muon 50M two bits 64 : muon 50M ddp> and <muon 50M two bits 64, seed 1 : muon 50M
  ddp, seed 1>; at 100M tokens, weight decay raised so that DDP does not overfit, <muon 100M two bits 64, decay 1 : muon
  100M ddp, decay 1> and <muon 100M two bits 64, decay 1, seed 1 : muon 100M ddp, decay 1, seed 1>). At 25M tokens it
  costs <muon 1000x two bits 64, outer 1.5 : rate muon 8e-3>. With AdamW it is met in tiny models only; with
  `tw.sparse_averaging` it costs <1000x sparse averaging, decay .9 : rate adamw 2e-3> at 25M tokens, <50M sparse
  averaging, decay .9 : ddp> and <50M sparse averaging, decay .9, seed 1 : ddp, seed 1> at 50M, <100M sparse averaging,
  decay 1 : 100M ddp, decay 1> at 100M.
- **Speed**: a DiLoCo round between training steps takes .51 (two workers) and .41 (four) of torchft's time on loopback.
  Eager keeps two workers busy 99% of the time on a line of 60 Mbit/s, where DDP reaches 21%.
"""

SETUP = """\
**Set-up of the quality runs.** A Llama-style decoder of 12M parameters (6 blocks of width 384, context 512), 64 MB of
English novels, a BPE of 4,096. Whole novels are held out: 17.4M tokens to train on, so that 25M tokens are 1.4 passes,
50M nearly three and 100M 5.8, and 262k held-out tokens that no run has seen. 32,768 tokens a step over all workers, so
that with $M$ workers each takes an $M$-th of every batch; the same tokens in the same order for all. AdamW or Muon
with a cosine, clip 1, weight decay .1, no dropout. The inner learning rate was tuned for DDP at 25M tokens and is the
same for all methods where the table does not say otherwise.

**How to read it.** Loss is in nats a token, of the model a user would export (`fleet.finish()`). "Against DDP" is
against DDP with the same inner optimizer, tokens and seed, at the best rate tried. Settings were chosen by the same
held-out loss that is reported. The model is small and the runs are short; both make methods that meet seldom look worse
than in the papers.

**Noise.** Another seed (other initial weights, other batches) changed the loss of the {runs} runs that were repeated by
{least:.2f}% to {most:.2f}%, by {middle:.2f}% in the median ([table](results/runs.md#what-another-seed-changes)).
"Within noise" is within what another seed changed for the runs in question, or within that median where they have one
seed. Where two seeds are known a claim is judged by both: it "holds on average" if it holds for the mean of the two and
not for each.

**Bytes.** "Sent" counts each message once, as the papers do. "Received" is what reaches a worker, against DDP's
all-reduce among as many: sparse messages are gathered from all others, dense ones of a few bits go in two shots with
int8 on the way back. It counts what is exchanged for an evaluation, too: by eager at each of twelve, by Local Adam,
DES-LOC and local states with a period of 256 at every other one.

**WikiText-2** is its test part in the same tokens: Wikipedia, for a model that knows novels. The later runs have it.
Its losses are high and uneven: the two seeds of DDP at 100M tokens differ by <second of 100M ddp, seed 1 : second of
100M ddp> there, and by <100M ddp, seed 1 : 100M ddp> on the held-out novels. It tells large differences only.
"""

ON_A_CPU = """\
**On a CPU**, the same claims again: a byte model of .26M parameters, 4.2M tokens of novels (16 a
parameter, .3 of a pass), batches of 2,048 tokens; AdamW or Muon at the best rate of DDP. Where the runs on a GPU have
too few steps or repeat their text, these have neither fault, but the model is tiny, and what helps it need not help a
large one.
"""

KEPT = """## What "kept" and "two bits" are

One row each. "Two bits" with feedback and a plain mean is `tw.two_bit_averaging`; in "kept" what is not sent stays in
the live parameters (`tw.Carry`) instead of a residual:

```python
import thinwire as tw


def kept(every, codec):
    return tw.table("kept", tw.Sync(tw.params, tw.Every(every), tw.Carry(tw.SGD(1.0)), codec), every=every)


strongest = kept(8, tw.TopK(74, 4096, values=tw.TwoBit()))  # "kept 8", 1000x fewer bytes than DDP
all_values = kept(64, tw.TwoBit())  # "two bits 64, kept", as many bytes
```
"""

RUNS = """\
Each table is one list of runs, in the order in which they were run, and one command. What they mean is said
in [Results](../results.md), and so is [how they were made](../results.md#set-up). A method is an expression: `tw` is
thinwire, `fragments(n)` is `tw.by_layer(model, n)`, `rows(rule, every, delay, codec, feedback)` one row for the
parameters.
"""

SPEEDS = """\
Ratios are of one run, between neighbours in time. How each was measured, and the floor that memory or the line
sets, is in `bench/README.md`.
"""

NOT_LISTED = """## Not run

Beside what [the tables](results/runs.md) say:

- On a GPU: more than two seeds; a second seed for most runs; DDP at 100M with other rates, decays or dropout; the 35M
  shape for longer than 25M tokens.
- A sweep of outer learning rates. Tried: momentum .6 and .9 at rate .7 for DiLoCo and relay, .4 with .9 for DiLoCo;
  .4 and .2 with .9 and .7 with .6 for eager, .4 and .1 with .9 for delayed; 1 and 1.5 for sparseloco and sparse
  averaging; .7 with .9, .6, .3 and 1, 1.5, 2 without momentum for two bits.
- DES-LOC's newcomers with a second seed or with longer to go.
- ADOPT with other periods than 32.
- At 1000x: DES-LOC rows below fp32; on a GPU sparseloco at 3000x, other numbers of workers; two bits at other weight
  decays.
- "consensus" with other numbers of components than 32 and 256.
- A ResNet-20 with DDP at eight workers.

"""


DESLOC = """\
DES-LOC at half the bytes of Local Adam, two seeds: <desloc 16 : local adam 16> and <desloc 16, seed 1 : local adam 16,
seed 1> at Kx = 16, <desloc 32 : local adam 32> and <desloc 32, seed 1 : local adam 32, seed 1> at 32, <100M desloc 32 :
100M local adam 32> and <100M desloc 32, seed 1 : 100M local adam 32, seed 1> at 32 and 100M tokens, <desloc 256 : local
adam 256> and <desloc 256, seed 1 : local adam 256, seed 1> at 256; one seed: <muon desloc 32 : muon local 32> at 32
with Muon. All at short periods are above zero: DES-LOC is a little worse there, by about what another seed changes. At
256 the test is weak: in 1,536 steps the first moments meet twice and the second once. Moments that are left local do
nearly as well, at 32 (<states local 32 : desloc 32>, second seed <states local 32, seed 1 : desloc 32, seed 1>) and at
256 (<states local 256 : desloc 256>), and send a third less. Nesterov (1, .9) on the mean drift costs <desloc 32
nesterov : desloc 32>: the same momentum as above. DiLoCo at 256 with its .9 ends at <diloco 256>, after <lowest of
diloco 256> at its lowest.

- *Equal periods for both moments* (3 of the parameters' each, a tenth more bytes) change DES-LOC by <desloc 16, equal
  moments : desloc 16> and <desloc 16, equal moments, seed 1 : desloc 16, seed 1> at 16, <desloc 32, equal moments :
  desloc 32> and <desloc 32, equal moments, seed 1 : desloc 32, seed 1> at 32: little, but each time. With the published
  ratios the others' first moment reaches rows of the embedding that a worker has not seen three periods before their
  second moment does, and until then its steps there are huge.
- *Newcomers.* Workers doubled half way, so that each then takes half of the batch it had: <desloc 32, doubled, mean
  state : desloc 32> if newcomers take the mean of the optimizer states, <desloc 32, doubled, one state : desloc 32> if
  they take one worker's. Stable, both; that one worker's state is worse, as published, does not show here.
- *ADOPT* hardly learns in 768 steps, with DDP as well: with AdamW on the embeddings DDP <ADOPT+AdamW ddp>, all states
  averaged <ADOPT+AdamW local 32>, DES-LOC <ADOPT+AdamW desloc 32>; on all parameters <ADOPT local 32> and <ADOPT desloc
  32>. Its second moment begins as the squared first gradient and, with the published beta of .9999, hardly moves in so
  short a run. With .99 it learns more: DDP <ADOPT .99 ddp>, all states averaged <ADOPT .99 local 32>, DES-LOC <ADOPT
  .99 desloc 32>, <ADOPT .99 desloc 32 : ADOPT .99 local 32>. So with ADOPT the equality does not show either.
"""

DESLOC_ON_A_CPU = """\
- *Half the bytes of Local Adam*: <fresh desloc 16 : fresh local adam 16> and <fresh desloc 16, seed 1 : fresh local
  adam 16, seed 1> at 16, <fresh desloc 32 : fresh local adam 32> and <fresh desloc 32, seed 1 : fresh local adam 32,
  seed 1> at 32, <?fresh desloc 256 : fresh local adam 256> at 256; with Muon at 32 <?fresh muon desloc 32 : fresh muon
  local 32>, with ADOPT (second beta .99) <?fresh ADOPT .99 desloc 32 : fresh ADOPT .99 local 32>.
- *Against DDP* (<fresh rate adamw 4e-3>): <fresh desloc 16 : fresh rate adamw 4e-3> at 16, <fresh desloc 32 : fresh
  rate adamw 4e-3> at 32, <?fresh desloc 256 : fresh rate adamw 4e-3> at 256.
- *Moments* left local: <fresh states local 32 : fresh desloc 32> at 32, <?fresh states local 256 : fresh desloc 256> at
  256; reset at each meeting: <fresh states reset 32 : fresh desloc 32>. *Nesterov* (1, .9): <fresh desloc 32 nesterov :
  fresh desloc 32>.
- *Newcomers*: <fresh desloc 32, doubled, mean state : fresh desloc 32> with the mean of the states, <fresh desloc 32,
  doubled, one state : fresh desloc 32> with one worker's.
"""

OVERLAP = """\
Relay (`tw.relay_diloco`) reaches the goals: <M2 relay .6 : M2 diloco .6>, <M4 relay .6 : M4 diloco .6> and <M8 relay .6
: M8 diloco .6> against DiLoCo with the same outer step at 2, 4 and 8 workers, where eager loses <M2 eager : M2 diloco>,
<M4 eager : M4 diloco> and <M8 eager : M8 diloco>. With a second seed relay's gap is <M2 relay .6, seed 1 : M2 diloco
.6, seed 1>, <M4 relay .6, seed 1 : M4 diloco .6, seed 1> and <M8 relay .6, seed 1 : M8 diloco .6, seed 1>, and .6
changes DiLoCo's loss by <M2 diloco .6, seed 1 : M2 diloco, seed 1> at two workers. In the 35M shape, two workers, H =
30, it is <35M M2 relay : 35M M2 diloco .6> (second seed <35M M2 relay, seed 1 : 35M M2 diloco .6, seed 1>), and at H =
100 in the 12M one <M2 H100 relay : M2 H100 diloco .6>. At 100M tokens and four workers it is <100M relay .6 : 100M
diloco .6> (<100M relay .6, seed 1 : 100M diloco .6, seed 1>), and DiLoCo is <100M diloco .6 : 100M ddp> above DDP. What
it is made of, at four workers:

- *Short delays.* Fragments whose answers are a whole period old: <M4 relay, full delay : M4 diloco .6>; the whole
  model, a period old (carry): <M4 carry : M4 diloco .6>. So relay keeps the line busy all the time, but does not hide a
  *latency* of a whole period.
- *Less outer momentum.* Relay with .9: <M4 relay : M4 relay .6> more. This is not about overlap: DiLoCo's own default
  of .9 is the larger problem at this scale. With .6 DiLoCo's loss changes by <M2 diloco .6 : M2 diloco>, <M4 diloco .6
  : M4 diloco> and <M8 diloco .6 : M8 diloco> at 2, 4 and 8 workers, and most of it is lost early: plain averaging for
  the first 256 of 1,536 steps and .9 after them gives <M4 diloco, averaged at first : M4 diloco>. The inner learning
  rate may have a part in it: in the earlier runs, at half the rate, DiLoCo with .9 was <earlier M4 diloco : earlier
  ddp> above DDP at four workers, here it is <M4 diloco : ddp>.
- *The delay itself.* The same fragments without any: <M4 relay .6, no delay : M4 diloco .6> against DiLoCo. So
  fragments are better than one meeting of all, and the five steps of delay cost <M4 relay .6 : M4 relay .6, no delay>.
- *Keeping local progress* instead of streaming's mix: little. The same fragments, delay and momentum with mix .5 are
  <M4 relay, mixed .6 : M4 relay .6> worse at four workers and <M8 relay, mixed .6 : M8 relay .6> at eight; with mix .5
  and momentum .9, <M4 relay, mixed : M4 relay .6> (four).
- *Forecast*, a rule on trial that moves the own progress towards the last mean, is the best with answers a whole period
  old: <M2 forecast : M2 diloco .6>, <M4 forecast : M4 diloco .6> and <M8 forecast : M8 diloco .6> at 2, 4 and 8
  workers, where eager loses what is said above. One seed, one setting: it is in `bench/forecast.py`, not in the
  library.
- *The published outer step* (.4, .9), two workers, H = 30: eager loses <M2 H30 eager : M2 H30 diloco .4> against
  DiLoCo, with the second seed <M2 H30 eager, seed 1 : M2 H30 diloco .4, seed 1>: the published 2.3%, on average. In the
  35M shape it loses <35M M2 eager : 35M M2 diloco .4> (<35M M2 eager, seed 1 : 35M M2 diloco .4, seed 1>) in half as
  many tokens, so that the published number is not reached there; at H = 100 <M2 H100 eager : M2 H100 diloco .4>. E3M0
  adds <M2 H30 eager E3M0 : M2 H30 eager>; with fragments, too, eager loses <M2 H30 eager streaming, E3M0 : M2 H30
  diloco .4>. Delayed updates lose <M2 H30 delayed : M2 H30 diloco .4>, at a rate of .1 <M2 H30 delayed .1 : M2 H30
  diloco .4>; two phases <M2 H30 eager, two phases : M2 H30 diloco .4>. Fragments that land one inner step later are
  *better* than DiLoCo with the same outer step, <M2 H30 one inner step : M2 H30 diloco .4>, in E3M0 <M2 H30 one inner
  step, E3M0 : M2 H30 diloco .4>: mixing takes the edge off a momentum that is too high here.
- *The same at four workers*: eager <M4 H30 eager : M4 H30 diloco .4>, at a rate of .2 <M4 H30 eager .2 : M4 H30 diloco
  .4>, in E3M0 <M4 H30 eager E3M0 : M4 H30 diloco .4>, at H = 100 <M4 H100 eager : M4 H100 diloco .4>; delayed <M4 H30
  delayed : M4 H30 diloco .4>, at .1 <M4 H30 delayed .1 : M4 H30 diloco .4>; one inner step <M4 H30 one inner step : M4
  H30 diloco .4>. Half the rate, the remedy for many workers, mends a third of what eager loses there.
- Tried and of little use: a start without delay for carry (<M4 carry, start without delay : M4 carry>); less momentum
  for eager at rate .7, which still ends <M4 eager .6 : M4 diloco .6> above DiLoCo.
"""

OVERLAP_ON_A_CPU = """\
- *Overlap with the published outer step* (.4, .9), two workers, a period of 30: eager loses <fresh M2 H30 eager : fresh
  M2 H30 diloco .4> against DiLoCo (second seed <fresh M2 H30 eager, seed 1 : fresh M2 H30 diloco .4, seed 1>), two
  phases <fresh M2 H30 eager, two phases : fresh M2 H30 diloco .4>, delayed <fresh M2 H30 delayed : fresh M2 H30 diloco
  .4>, delayed at a rate of .1 <fresh M2 H30 delayed .1 : fresh M2 H30 diloco .4>, fragments that land one inner step
  later <fresh M2 H30 one inner step : fresh M2 H30 diloco .4>; E3M0 changes eager by <fresh M2 H30 eager E3M0 : fresh
  M2 H30 eager>. At a period of 100 eager loses <fresh M2 H100 eager : fresh M2 H100 diloco .4>, at four workers <fresh
  M4 H30 eager : fresh M4 H30 diloco .4> (30). The published +2.3% is of 35M parameters and longer runs.
- *Relay* against DiLoCo with its own outer step (.7, .6), a period of 30: <fresh M2 H30 relay : fresh M2 H30 diloco .6>
  at two workers (second seed <fresh M2 H30 relay, seed 1 : fresh M2 H30 diloco .6, seed 1>), <fresh M4 H30 relay :
  fresh M4 H30 diloco .6> at four (<fresh M4 H30 relay, seed 1 : fresh M4 H30 diloco .6, seed 1>), <fresh M8 H30 relay :
  fresh M8 H30 diloco .6> at eight.
"""

DECOUPLED = """\
The paper claims up to 16 times fewer bytes than DiLoCo, at a loss between DiLoCo's at 128 and at 512. Against DiLoCo at
128, at 2, 4 and 8 workers:

- *"consensus" with 256 of 4,096 components*, 18 times fewer bytes: <M2 decoupled 128 consensus, 256 : M2 diloco 128>,
  <decoupled 128 consensus, 256 : diloco 128> and <M8 decoupled 128 consensus, 256 : M8 diloco 128>; with a second seed
  <M2 decoupled 128 consensus, 256, seed 1 : M2 diloco 128, seed 1>, <decoupled 128 consensus, 256, seed 1 : diloco 128,
  seed 1> and <M8 decoupled 128 consensus, 256, seed 1 : M8 diloco 128, seed 1>. The claim holds, and from four workers
  on it costs nothing. It is <decoupled 128 consensus, 256 : ddp> above DDP (four workers) for
  <sent of decoupled 128 consensus, 256> fewer bytes. "mean" is worse with as many components (<decoupled 128 mean, 256
  : diloco 128> at four workers).
- *With the published 32 components*, 146 times fewer: "consensus" <M2 decoupled 128 consensus : M2 diloco 128>,
  <decoupled 128 consensus : diloco 128> and <M8 decoupled 128 consensus : M8 diloco 128>, "mean" <M2 decoupled 128 mean
  : M2 diloco 128>, <decoupled 128 mean : diloco 128> and <M8 decoupled 128 mean : M8 diloco 128>. That is worker 0's
  copy; the mean of its workers is far worse. "consensus" misses the bracket at two workers (<M2 decoupled 128
  consensus> against <M2 diloco 512>): it starts slowly, 32 components a round and only twelve rounds, and the rest
  waits in the residual. It is the default because it keeps workers equal and is the best at eight; with so few
  components, two to four workers and few rounds take `variant="mean"`, and export worker 0's copy.
- *"paper"*, as printed: <M2 decoupled 128 paper : M2 diloco 128> at two workers. At four and eight it diverges
  (<decoupled 128 paper>, <M8 decoupled 128 paper>).
- The bracket is wide: DiLoCo at 512 meets three times in this run, and from four workers on gets worse at the last
  meeting (see its curve in the raw file: 4.12 before it, <diloco 512> after, four workers).
- *A ResNet-20 on Fashion-MNIST*, loss on the test images, four workers: DiLoCo at 128 <resnet M4 diloco 128>, at 512
  <resnet M4 diloco 512>, "consensus" with 256 components <resnet M4 consensus, 256> (17 times fewer bytes), with 32
  <resnet M4 consensus> (84 times), "mean" <resnet M4 mean>, "paper" <resnet M4 paper>. At eight: <resnet M8 diloco
  128>, <resnet M8 diloco 512>, <resnet M8 consensus, 256>, <resnet M8 consensus>, <resnet M8 mean>, <resnet M8 paper>.
  At two: <resnet M2 diloco 128>, <resnet M2 diloco 512>, <resnet M2 consensus, 256>, <resnet M2 consensus>, <resnet M2
  mean>, <resnet M2 paper>. So here "consensus" with 256 components is better than DiLoCo each time, and as good as DDP
  (two workers <resnet M2 ddp>, four <resnet M4 ddp>).
"""

DECOUPLED_ON_A_CPU = """\
- *The byte model*, against DiLoCo at 128, 16 rounds: "consensus" <fresh M2 decoupled 128 consensus : fresh M2 diloco
  128> at two workers and <?fresh decoupled 128 consensus : fresh diloco 128> at four, "mean" <?fresh M2 decoupled 128
  mean : fresh M2 diloco 128> and <?fresh decoupled 128 mean : fresh diloco 128>, "paper" <?fresh M2 decoupled 128 paper
  : fresh M2 diloco 128> and <?fresh decoupled 128 paper : fresh diloco 128>. With 256 of 4,096 components, 18 times
  fewer bytes: "consensus" <?fresh M2 decoupled 128 consensus, 256 : fresh M2 diloco 128> and <?fresh decoupled 128
  consensus, 256 : fresh diloco 128>, "mean" at four <?fresh decoupled 128 mean, 256 : fresh diloco 128>. So the bracket
  that "consensus" misses with 32 components holds with 256, and at four workers DiLoCo's own loss is reached: with few
  components and few rounds most of what was learnt waits in the buffer.
- *A ResNet-8 on Fashion-MNIST* at 2, 4 and 8 workers: "consensus" lies between DiLoCo at 128 and at 512 each time
  (<small resnet M2 consensus>, <small resnet M4 consensus>, <small resnet M8 consensus>) with 77x fewer bytes; "mean"
  is worse each time (<small resnet M2 mean>, <small resnet M4 mean>, <small resnet M8 mean>), and "paper" diverges
  (<small resnet M2 paper>, <small resnet M4 paper>, <small resnet M8 paper>). With 256 components, 17x fewer: <small
  resnet M2 consensus, 256>, <small resnet M4 consensus, 256> and <small resnet M8 consensus, 256>, where DiLoCo at 128
  has <small resnet M2 diloco 128>, <small resnet M4 diloco 128> and <small resnet M8 diloco 128>.
"""

COMPOSED = """\
1000 times fewer bytes than DDP within 1% of its loss was the goal. It is missed at 25M tokens, and met with Muon from
50M tokens on, with two seeds; with AdamW it is missed, by little at 50M tokens, and reached at 100M only against a DDP
that overfits.

- *25M tokens* (1.4 passes). The best is <1000x sparse averaging, decay .95 : rate adamw 2e-3> with AdamW (sparse
  averaging every 4, decay .95; .9 <1000x sparse averaging, decay .9 : rate adamw 2e-3>) and <muon 1000x two bits 64,
  outer 1.5 : rate muon 8e-3> with Muon (`tw.two_bit_averaging`, two bits every 64 with an outer rate of 1.5; with 1
  <muon 1000x two bits 64, averaged : rate muon 8e-3>, with 2 <muon 1000x two bits 64, outer 2 : rate muon 8e-3>).
  Second seed: <1000x sparse averaging, decay .9, seed 1 : rate adamw 2e-3, seed 1> (decay .9) and <muon 1000x two bits
  64, outer 1.5, seed 1 : rate muon 8e-3, seed 1>.
- *25M tokens in four times as many steps*, 8,192 tokens each: no better. Sparse averaging ends <steps 1000x sparse
  averaging : steps rate adamw 1e-3> above DDP with AdamW (second seed <steps 1000x sparse averaging, seed 1 : steps
  rate adamw 2e-3, seed 1>), two bits <steps muon 1000x two bits 64 : steps rate muon 4e-3> with Muon. So it is not the
  number of rounds that is missing.
- *50M tokens* (2.9 passes), *Muon*, two bits every 64, all at 4e-3: with an outer rate of 1 <muon 50M two bits 64 :
  muon 50M ddp> and <muon 50M two bits 64, seed 1 : muon 50M ddp, seed 1> (two seeds), with 1.5 <muon 50M two bits 64,
  outer 1.5 : muon 50M ddp> and <muon 50M two bits 64, outer 1.5, seed 1 : muon 50M ddp, seed 1>. DDP's lowest is its
  last, but it fits the training text better (<train of muon 50M ddp> against <train of muon 50M two bits 64, outer
  1.5>), so that repeated text may have a part here, too. *AdamW*: sparse averaging <50M sparse averaging, decay .9 :
  ddp> and <50M sparse averaging, decay .9, seed 1 : ddp, seed 1> (two seeds), with a decay of .8 <50M sparse averaging
  : ddp>, of .95 <50M sparse averaging, decay .95 : ddp>, at a rate of 3e-3 <50M sparse averaging, decay .9, rate 3e-3 :
  ddp> (DDP is as good at 3e-3, <50M ddp, rate 3e-3>); sparseloco every 4 <50M sparseloco 4 : ddp>.
- *100M tokens* (5.8 passes), *Muon*, two bits every 64, outer rate 1: <muon 100M two bits 64> against DDP's <muon 100M
  ddp>, <muon 100M two bits 64 : muon 100M ddp>; with a second seed <muon 100M two bits 64, seed 1 : muon 100M ddp, seed
  1>. But DDP overfits: <train of muon 100M ddp> against <train of muon 100M two bits 64> on the last batch, and its
  held-out loss rises at the end (lowest <lowest of muon 100M ddp>). Every 192 steps, 3000x, the loss is lower still
  (<muon 100M two bits 192>): workers that meet *less* do better there.
- *100M tokens with ten times the weight decay* (1 instead of .1), for both, so that DDP does not overfit: it ends at
  <muon 100M ddp, decay 1>, its lowest point, two bits at <muon 100M two bits 64, decay 1>: <muon 100M two bits 64,
  decay 1 : muon 100M ddp, decay 1>, with a second seed <muon 100M two bits 64, decay 1, seed 1 : muon 100M ddp, decay
  1, seed 1>, with an outer rate of 1.5 <muon 100M two bits 64, decay 1, outer 1.5 : muon 100M ddp, decay 1>. So all of
  the -2.9% above was regularisation, and what is left is equality. With AdamW, one seed, DDP ends at <100M ddp, decay
  1>, sparseloco every 4 at <100M sparseloco 4, decay 1>, sparse averaging at <100M sparse averaging, decay 1>: <100M
  sparse averaging, decay 1 : 100M ddp, decay 1>, missed. Other decays were not tried.
- *100M tokens, AdamW*, sparseloco every 4 with decay .9: <100M sparseloco 4 : 100M ddp> with the first seed, <100M
  sparseloco 4, seed 1 : 100M ddp, seed 1> with the second, while DDP's own seeds differ by <100M ddp, seed 1 : 100M
  ddp>: within 1% on average, not each time. Here too DDP has the lower training loss (<train of 100M ddp> against
  <train of 100M sparseloco 4>).
- *Bytes.* Both send <sent of muon 100M two bits 64> less than DDP as the papers count. What a worker receives, of four:
  <received of muon 100M two bits 64> less with two bits, <received of 100M sparseloco 4> less with sparseloco.

What each part did at 25M tokens, four workers:

- *AdamW: one value of every 64* (sparse averaging, every 4): <1000x sparse averaging, decay .9 : rate adamw 2e-3> with
  a decay of .9, <1000x sparse averaging : rate adamw 2e-3> with .8 (second seed <1000x sparse averaging, seed 1 : rate
  adamw 2e-3, seed 1>), <1000x sparse averaging, outer 1.5 : rate adamw 2e-3> with .8 and an outer rate of 1.5, <1000x
  sparse averaging, decay .95 : rate adamw 2e-3> with .95. In tiny models .8 is better (below). Inner rates of 1e-3 and
  3e-3 instead of 2e-3: <1000x sparse averaging, decay .9, rate 1e-3 : rate adamw 2e-3> and <1000x sparse averaging,
  decay .9, rate 3e-3 : rate adamw 2e-3>, of 4e-3 <1000x sparse averaging, decay .9, rate 4e-3 : rate adamw 2e-3>. Every
  2 steps in chunks of 160 <1000x sparse averaging 2, chunk 160 : rate adamw 2e-3>. With Muon <muon 1000x sparse
  averaging : rate muon 8e-3>, as good as two bits.
- *AdamW: shorter periods with fewer values each.* Sparseloco every 16 <1000x sparseloco 16>, 8 <1000x sparseloco 8>, 4
  <1000x sparseloco 4>, 2 <1000x sparseloco 2>. Every 4 is below DiLoCo every 16 in fp32 with momentum .6 (<25M diloco
  16 .6>, 63 times the bytes). Local Adam every 16 in fp32: <local adam 16>.
- Sparseloco's residual: decay .9 <1000x sparseloco 4, decay .9 : 1000x sparseloco 4> at 4; none (1.0) <1000x sparseloco
  8, decay 1 : 1000x sparseloco 8> at 8. Worse at 8, too: outer rate 1.5 <1000x sparseloco 8, outer 1.5 : 1000x
  sparseloco 8>, inner rate 4e-3 <1000x sparseloco 8, lr 4e-3 : 1000x sparseloco 8>, the mean over all workers instead
  of over the senders <1000x sparseloco 8, mean of all : 1000x sparseloco 8>.
- *AdamW: where the loss is made.* fp32 averages every 4, with 255 times the bytes, are <25M averaged 4 : rate adamw
  2e-3> above DDP already, so that sparsity adds the smaller part. Of that, a third comes back at twice the inner rate
  and half by meeting at every step: every 4 at 4e-3 <25M averaged 4, rate 4e-3 : rate adamw 2e-3>, every step at 2e-3
  <25M averaged 1 : rate adamw 2e-3>. What is left then may be that each worker's second moment is of a quarter of the
  batch. With first moments that meet, too, <25M averaged 4, first moments 4 : rate adamw 2e-3>, with all states <25M
  local adam 4 : rate adamw 2e-3>, at every step <25M local adam 1 : rate adamw 2e-3>. Sparse averaging gains nothing at
  4e-3 (above), nor much with a first moment that forgets twice as fast (.8: <quick 1000x sparse averaging, decay .9 :
  quick rate adamw 2e-3> against DDP with the same). An outer rate above 1 does not mend that: <25M averaged 4, outer
  1.5 : rate adamw 2e-3> with 1.5, <25M averaged 4, outer 2 : rate adamw 2e-3> with 2. Gradients that travel sparsely
  every step instead (one of 512 in two bits, residual .99, 1,500x) end at <1000x gradients>.
- *Muon: all values, seldom, or one of 64, often.* Two bits every 64 <muon 1000x two bits 64, averaged>, sparseloco
  every 4 <muon 1000x sparseloco 4>. The strongest 16 of 64 every 64 <muon 1000x quarter 64>, the strongest 8 of 64
  every 32 <muon 1000x eighth 32>, kept <muon 1000x kept eighth 32>; the strongest 37 of 4,096 every 4, kept, mean over
  all <muon 1000x kept 4, mean of all>. With AdamW it is the other way round: two bits every 64 <1000x two bits 64,
  averaged>.
- *No outer momentum.* Muon, two bits: .9 <muon 1000x two bits 64>, .6 <muon 1000x two bits 64 .6>, .3 <muon 1000x two
  bits 64, outer .7/.3> (rate .7), none (rate 1) <muon 1000x two bits 64, averaged>.
- *But a larger outer rate*, 1.5: <muon 1000x two bits 64, outer 1.5 : muon 1000x two bits 64, averaged> at 25M tokens,
  <muon 50M two bits 64, outer 1.5 : muon 50M two bits 64> at 50M (second seed <muon 50M two bits 64, outer 1.5, seed 1
  : muon 50M two bits 64, seed 1>). fp32 averages do not want it (<muon 25M averaged 64,
  outer 1.5 : muon 25M averaged 64>), so it makes up for what two bits hold back. 2 is too much.
- *What the bits cost.* The average in fp32 every 64 is <muon 25M averaged 64>, <muon 25M averaged 64 : rate muon 8e-3>
  above DDP; the two bits add <muon 1000x two bits 64, averaged : muon 25M averaged 64>. *Feedback* does nothing that
  can be told from noise: without it <muon 1000x two bits 64, no feedback : muon 1000x two bits 64, averaged>. It costs
  a copy of the model in memory.
- *Overlap*, relay's way, with two bits and Muon: <muon 1000x two bits 64, relay : muon 1000x two bits 64, averaged>.
- *Rates.* DDP with Muon is best at the highest rate tried (8e-3, <rate muon 8e-3>; 4e-3 <rate muon 4e-3>), two bits at
  4e-3 (8e-3 <muon 1000x two bits 64, averaged, lr 8e-3>, 2e-3 <muon 1000x two bits 64, averaged, lr 2e-3>). All Muon
  runs but those are at 4e-3, DDP at 100M tokens as well.
- Of no use: a DCT (<1000x kept 16, DCT : 1000x kept 16> to kept), E3M0 every 128 (<1000x E3M0 128>), decoupled momentum
  every 16 (<1000x decoupled 16>) and every 4 (<1000x decoupled 4>).

- *A slow momentum beside the fresh gradient* (as in MT-DAO, .99) does not help DDP in 768 steps: <slow adamw ddp : rate
  adamw 2e-3> with AdamW, <slow muon ddp : rate muon 4e-3> with Muon. Nor does it help at 1000x: sparseloco every 4
  <slow adamw 1000x sparseloco 4>, two bits every 64 with Muon <slow muon 1000x two bits 64>, and <slow muon 1000x two
  bits 96, momentum 192> if it meets in two bits every 192 (against <1000x sparseloco 4, decay .9> and <muon 1000x two
  bits 64, averaged>).

At 3000x and 25M tokens the best is <3000x sparse averaging : rate adamw 2e-3> with AdamW (sparse averaging every 12,
decay .8; kept <3000x kept 24 : rate adamw 2e-3>) and <muon 3000x two bits 192, averaged : rate muon 8e-3> with Muon
(`two_bit_averaging(192)`; kept <muon 3000x kept 24 : rate muon 8e-3>, two bits with outer momentum .9 <muon 3000x two
bits 192 : rate muon 8e-3>).

On WikiText-2 DDP at 100M tokens is far above both: Muon <second of muon 100M ddp> and <second of muon 100M ddp, seed 1>
against <second of muon 100M two bits 64> and <second of muon 100M two bits 64, seed 1> for two bits; AdamW <second of
100M ddp> and <second of 100M ddp, seed 1> against <second of 100M sparseloco 4> and <second of 100M sparseloco 4, seed
1> for sparseloco. It fits with overfitting to the novels, and is no evidence for more: at 25M tokens, where DDP does
not overfit, Muon's DDP (8e-3) has <second of rate muon 8e-3>, the fp32 average <second of muon 25M averaged 64>.
"""

COMPOSED_ON_A_CPU = """\
- *1000x fewer bytes within 1% of DDP* is reached with AdamW: the strongest one of every 64 values, every 5 steps
  (`tw.sparse_averaging(5, decay=.8)`, 1,082x): <fresh 1000x one of 64, 5, decay .8 : fresh rate adamw 4e-3> and, with a
  second seed, <fresh 1000x one of 64, 5, decay .8, seed 1 : fresh rate adamw 4e-3, seed 1>; with an outer rate of 1.5
  <fresh 1000x one of 64, 5, decay .8, outer 1.5 : fresh rate adamw 4e-3> and <fresh 1000x one of 64, 5, decay .8, outer
  1.5, seed 1 : fresh rate adamw 4e-3, seed 1>. At four times the size and 2 tokens a parameter (1,227x) <fresh 1M 1000x
  sparse averaging : fresh 1M rate adamw 4e-3>; at eight workers <fresh M8 1000x one of 64, 5, decay .8 : fresh rate
  adamw 4e-3>. Better than DDP it is only with AdamW: DDP with Muon is at <fresh rate muon 4e-3> (its best rate is the
  lowest tried).
- *What it is made of.* Chunks of 64 instead of 4,096: sparseloco with as many bytes, every 4, both with a decay of .9,
  <fresh 1000x sparseloco 4 : fresh rate adamw 4e-3> against <fresh 1000x one of 64, 5 : fresh rate adamw 4e-3>; chunks
  of 32 every 8 <fresh 1000x one of 32, 8 : fresh rate adamw 4e-3>, of 128 every 3 <fresh 1000x one of 128, 3 : fresh
  rate adamw 4e-3>, two of 64 every 9 <fresh 1000x two of 64, 9 : fresh rate adamw 4e-3>. The residual: without it
  <fresh 1000x one of 64, 5, no residual : fresh rate adamw 4e-3>, kept in the live parameters <fresh 1000x one of 64,
  5, kept : fresh rate adamw 4e-3>, with a decay of 1 <fresh 1000x one of 64, 5, decay 1 : fresh rate adamw 4e-3>, of .9
  <fresh 1000x one of 64, 5 : fresh rate adamw 4e-3>, of .7 <fresh 1000x one of 64, 5, decay .7 : fresh rate adamw
  4e-3>. The mean over the senders: over all workers <fresh 1000x one of 64, 5, mean of all : fresh rate adamw 4e-3>.
  Tried and worse by far, with the same codec: a residual of what the answer did not do instead of what was not sent
  (1.5822 with a decay of .9, 1.8041 with 1, against <fresh 1000x one of 64, 5> and <fresh 1000x one of 64, 5, decay 1>;
  not in the lists).
- *Why it works* is not known. It is more than a cheap copy of averaging: fp32 averages every 5 steps, with 216 times
  the bytes, are <fresh averaged 5 : fresh rate adamw 4e-3> above DDP. Most values are sent by one worker alone, and
  then all move by the whole of what it says, which is a larger step: with the mean over all workers it is far worse.
  Nothing of the kind was given to DDP but its learning rate. Chunks and decay go together: sparseloco with a decay of
  .8 <fresh 1000x sparseloco 4, decay .8 : fresh rate adamw 4e-3>. Values in bf16, every 11, <fresh 1000x one of 64, 11,
  bf16 : fresh rate adamw 4e-3> (decay .9).
- *3000x* costs <fresh 3000x one of 64, 14 : fresh rate adamw 4e-3> (every 14, decay .9; .8 <fresh 3000x one of 64, 14,
  decay .8 : fresh rate adamw 4e-3>; one of 256 every 6 <fresh 3000x one of 256, 6 : fresh rate adamw 4e-3>).
- *Muon* is not reached: two bits every 64 <fresh muon 1000x two bits 64 : fresh rate muon 4e-3> and <fresh muon 1000x
  two bits 64, seed 1 : fresh rate muon 4e-3, seed 1>, one of 64 every 5 <fresh muon 1000x one of 64, 5, decay .8 :
  fresh rate muon 4e-3>. The period costs nearly all of two bits' loss: averaging in fp32 every 64 <fresh muon averaged
  64 : fresh rate muon 4e-3>. One of 64 is another matter: averaging in fp32 every 5 costs <fresh muon averaged 5 :
  fresh rate muon 4e-3>, so that what is not sent costs the rest. An outer rate of 1.5 changes two bits by <fresh muon
  1000x two bits 64, outer 1.5 : fresh muon 1000x two bits 64> (second seed <fresh muon 1000x two bits 64, outer 1.5,
  seed 1 : fresh muon 1000x two bits 64, seed 1>; 2 <?fresh muon 1000x two bits 64, outer 2 : fresh muon 1000x two bits
  64>; with AdamW 1.5 <fresh 1000x two bits 64, outer 1.5 : fresh 1000x two bits 64>), averages in fp32 by <?fresh muon
  averaged 64, outer 1.5 : fresh muon averaged 64>, and one of 64 by <fresh muon 1000x one of 64, 5, decay .8, outer 1.5
  : fresh muon 1000x one of 64, 5, decay .8>; an inner rate of 8e-3 one of 64 by <fresh muon 1000x one of 64, 5, decay
  .8, rate 8e-3 : fresh muon 1000x one of 64, 5, decay .8>, of 2e-3 by <fresh muon 1000x one of 64, 5, decay .8, rate
  2e-3 : fresh muon 1000x one of 64, 5, decay .8>.
"""

SPEED = """\
A round in at most .6 of torchft's time was wanted. Between real training steps it holds: .51 with two
workers, .41 with four, .39 at 124M parameters, on loopback. At 1 Gbit/s, where the line is most of a round, ours takes
.90 with four workers and .87 at 124M parameters on an idle machine (`peers_lines_idle`; 1.36 in a run beside other
work), and on slower lines, which are all that counts there, as long: 1.02 and .98 at 100 and 20 Mbit/s (124M
parameters, 47 and 232 s, of which the bytes need 40 and 198). Rounds made one after the other (`bench/overhead.py`) do
not reach it with 10 and 100 tensors against torchft
without buckets, where .6 is what the bytes moved through memory allow at best (`bench/README.md`); with 1,000 tensors
they take a quarter. Our streaming takes .51 of torchft's with two workers and .97 with four, since it mixes in place
(`peers_loopback_streaming`; the tables before that say .65, 1.35 and, at 124M, 1.26). torch's DDP is faster than
`tw.ddp`, since it meets during the backward pass. DCT + top-k, encoded and merged, takes 35 to 38 times less time on a
GPU than the per-tensor approach in the same run, which is bound by its launches, and so by the host; on two cores 3.3
and 2.3 times less, and in another run on the idle machine 4.3 and 2.8.
"""


def setup(known: Known) -> str:
    changes = known.changes().values()
    numbers = {"runs": len(changes), "least": min(changes), "most": max(changes), "middle": median(changes)}
    return prose(SETUP.format(**numbers), known)


def prose(text: str, known: Known) -> str:
    return flow(filled(text, known)) + "\n"
