"""Saving a run and taking it up again: bit for bit, or with another method or number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.train import checkpoint, weights
from thinwire.train.config import Config
from thinwire.train.errors import UserError
from thinwire.train.methods import resolved_method
from thinwire.train.models import export_config
from thinwire.train.place import Place
from thinwire.train.progress import Talker

if TYPE_CHECKING:
    from thinwire.train.loop import Trainer


@dataclass
class Found:
    """The steps that one process found on its disk, newest first."""

    good: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)  # the first save was cut off: nothing to go back to
    refused: list[str] = field(default_factory=list)  # a line each
    incomplete: str = ""  # where none is good: what one is there of, and what is not, in a line for the user


class Keeper:
    """Writes and reads this process's parts of the checkpoints of a run."""

    def __init__(self, run: Path, config: Config, place: Place, talk: Talker) -> None:
        self.run, self.config, self.place, self.talk = run, config, place, talk
        self.parts = [self._part(worker) for worker in place.hosted]
        self.whole: list[int] = []  # steps to go back to, in the order in which the run came by them
        # with one checkpoint there would be none, while some processes have written the next and others have not
        self.keep = max(config.train.keep, 2 if place.notes.processes * place.inside > 1 else 1)

    def _part(self, worker: int) -> str:
        return f"worker-{worker}-shard-{self.place.inner}" if self.place.inside > 1 else f"worker-{worker}"

    def begin(self) -> None:
        """Before a run's first step: a kill within its first save must not look like a part that was lost later."""
        if not self.whole:
            checkpoint.mark_unsaved(self.run, self.parts)

    def save(self, trainer: Trainer) -> None:
        """Write this step. Then drop all but the last whole ones: also those that the run went back behind."""
        self._add(trainer)
        self.whole = self.whole[-self.keep :]
        checkpoint.drop_others(self.run, self.parts, self.whole)
        if self.place.writes:
            mine = self.place.hosted if self.place.separate else range(self.config.workers)
            checkpoint.drop_strangers(self.run, mine, self.whole[:-1])  # of the step just written too

    def save_alone(self, trainer: Trainer) -> None:
        """Write a step that the others may not have, and drop none: one of those before is the last that all have.

        A step that is whole already stays as it is: the model may hold the finished run's mean by now.
        """
        if trainer.step not in self.whole:
            self._add(trainer)

    def _add(self, trainer: Trainer) -> None:
        step = trainer.step
        try:
            self._write(trainer)
        except OSError:
            if step not in self.whole:  # some of its parts are no checkpoint
                checkpoint.drop(self.run, step, self.parts)
            raise
        self.whole = [*(other for other in self.whole if other != step), step]

    def _write(self, trainer: Trainer) -> None:
        fleet = trainer.fleet.state_dict()
        for index, part in enumerate(self.parts):
            files = self._worker(trainer, index) | {"fleet.pt": _of_worker(fleet, self.place.hosted[index])}
            checkpoint.save_part(self.run, trainer.step, part, self.config.workers, files)

    def _worker(self, trainer: Trainer, index: int) -> checkpoint.Files:
        replica = trainer.team.replicas[index]
        state = {
            "optimizers": [weights.optimizer_state(optimizer) for optimizer in replica.optimizers],
            "shard": trainer.team.shards[index].state_dict(),
            "method": self._method(),
            "bytes_before": trainer.bytes_before,
            "bytes": trainer.bytes_before + trainer.fleet.bytes_sent,
            "tokens": trainer.tokens,
            "own_steps": trainer.own_steps,
            "data": trainer.data.settings(),
        }
        described = export_config(replica.module)
        files: checkpoint.Files = {"model.safetensors": weights.named(replica.module), "state.pt": state}
        return files | ({"config.json": described} if described else {})

    def _method(self) -> dict[str, Any]:
        return {"name": self.config.method["name"], **resolved_method(self.config.method)}

    # -- taking it up again ----------------------------------------------------------------------------------------

    def restore(self, trainer: Trainer) -> None:
        """Bring the trainer to the newest step that every process has whole, and open its fleet."""
        checkpoint.put_back(self.run)
        heard = [Found(**note) for note in self.place.notes.exchange(asdict(self._look()))]
        listings = [found.good for found in heard]
        if _never_saved(heard):
            self.talk.say(f"{self.run} has no checkpoint yet: it begins at step 0")
            trainer.open_fleet(self.config.method)
            return
        if not set.intersection(*map(set, listings)):
            self.place.notes.leave()  # every process is about to refuse, and each must hear why
            self._refuse_incomplete([found.incomplete for found in heard])
        step = trainer.step = checkpoint.agree(listings)
        self.whole = [good for good in reversed(listings[self.place.notes.process]) if good <= step]
        workers = checkpoint.workers_of(self.run, step)
        if workers != self.config.workers:
            self._from_the_mean(trainer, step)
            self._say_change(f"workers {workers} -> {self.config.workers}")
            return
        stored = [checkpoint.load_part(self.run, step, part) for part in self.parts]
        for index, files in enumerate(stored):
            self._load_worker(trainer, index, files)
        self._open_fleet(trainer, stored[0]["state.pt"], [files["fleet.pt"] for files in stored])

    def _look(self) -> Found:
        found = Found()
        steps = [step for step in checkpoint.steps_in(self.run) if checkpoint.parts_in(self.run, step)]
        for step in steps:
            if self._is_unfinished(step):
                found.unfinished.append(step)
                continue
            try:
                self._verify(step)
                found.good.append(step)
            except checkpoint.Damaged as error:
                found.refused += [] if found.good else [str(error)]
        if not found.good:
            found.incomplete = next(filter(None, map(self._incomplete, steps)), "")
        for line in [] if found.incomplete else found.refused:
            self.talk.say(f"refused {line}; looking for the one before")
        return found

    def _is_unfinished(self, step: int) -> bool:
        """Whether the run was killed between two parts of its first checkpoint: what is missing was never saved."""
        missing = self._missing(step)
        return bool(missing) and all(checkpoint.is_unsaved(self.run, part) for part in missing)

    def _missing(self, step: int) -> list[str]:
        return [part for part in self._needed(step) if not (checkpoint.folder_of(self.run, step) / part).exists()]

    def _incomplete(self, step: int) -> str:
        """Which parts are here and which are not, and what to do; empty where that is not what is wrong."""
        here, missing = checkpoint.manifests_in(self.run, step), self._missing(step)
        if not (here and missing) or self._is_unfinished(step):
            return ""
        if self.place.separate and not self.place.elastic:
            wrong = f"{self.run} holds {_owners(here)}, this is --worker {self.place.hosted[0]}"
            return f"{wrong}: give each machine the folder that it had, or start anew with another --out"
        folder, workers = checkpoint.folder_of(self.run, step), checkpoint.workers_of(self.run, step)
        cures = "the --connect or --join line it was started with, or copy the missing parts here, or start anew"
        known = f"{folder} holds {_owners(here)} of {workers}, but not {_owners(missing)}"
        return f"{known}: resume with {cures} with another --out"

    def _refuse_incomplete(self, lines: Sequence[str]) -> None:
        """One's own line, or else the first of another process."""
        if own := lines[self.place.notes.process]:
            raise UserError(own)
        for process, line in enumerate(lines):
            if line:
                raise UserError(f"process {process}: {line}")

    def _verify(self, step: int) -> None:
        workers = checkpoint.workers_of(self.run, step)
        for part in self._needed(step):
            checkpoint.verify(self.run, step, part, workers)

    def _needed(self, step: int) -> list[str]:
        """One's own parts; of a run with another number of workers all, but the other sites' are on other disks."""
        workers = checkpoint.workers_of(self.run, step)
        if workers is None or workers == self.config.workers:
            return self.parts
        return self._here(step) or self.parts if self.place.separate else [*map(self._part, range(workers))]

    def _here(self, step: int) -> list[str]:
        """This shard's parts of all workers, as far as they are on this disk."""
        here, workers = checkpoint.parts_in(self.run, step), checkpoint.workers_of(self.run, step) or 0
        return [part for part in map(self._part, range(workers)) if part in here]

    def _load_worker(self, trainer: Trainer, index: int, files: checkpoint.Files) -> None:
        replica, state = trainer.team.replicas[index], files["state.pt"]
        _refuse_other_tokenizer(trainer, state)
        weights.load(replica.module, files["model.safetensors"])
        weights.load_optimizers(replica.optimizers, state["optimizers"])
        trainer.team.shards[index].load_state_dict(state["shard"])

    def _open_fleet(self, trainer: Trainer, state: dict[str, Any], fleets: list[dict[str, Any]]) -> None:
        stored = state["method"]
        trainer.bytes_before = state["bytes_before"]
        _take_counts(trainer, state)
        trainer.open_fleet(stored)
        trainer.fleet.load_state_dict({key: value for fleet in fleets for key, value in fleet.items()})
        if stored != self._method():
            self._mean_moments(trainer)
            trainer.fleet.switch(trainer.method(self.config.method))
            self._say_change(f"method {stored['name']} -> {self.config.method['name']}")

    def _mean_moments(self, trainer: Trainer) -> None:
        states = self._mean_state(trainer.step)["state.pt"]["optimizers"]
        for replica in trainer.team.replicas:
            weights.load_optimizers(replica.optimizers, states)

    def _from_the_mean(self, trainer: Trainer, step: int) -> None:
        """Another number of workers: all start from the mean of those stored here."""
        merged = self._mean_state(step)
        for index in range(len(self.parts)):
            self._load_worker(trainer, index, merged)
        trainer.bytes_before = merged["state.pt"]["bytes"]
        _take_counts(trainer, merged["state.pt"])
        trainer.open_fleet(self.config.method)

    def _mean_state(self, step: int) -> checkpoint.Files:
        """One worker's files with the mean of all parts on this disk."""
        stored = [checkpoint.load_part(self.run, step, part) for part in self._here(step)]
        states = [files["state.pt"] for files in stored]
        moments = [weights.mean_optimizer(list(each)) for each in zip(*(s["optimizers"] for s in states), strict=True)]
        tensors = weights.mean([files["model.safetensors"] for files in stored])
        return {"model.safetensors": tensors, "state.pt": states[0] | {"optimizers": moments}}

    def _say_change(self, what: str) -> None:
        self.talk.say(f"{what}: parameters are equal on all workers now")
        self.talk.say(f"{what}: optimizer moments are the mean of the parts on this disk")
        self.talk.say(f"{what}: residuals and outer momentum start anew")


def _never_saved(heard: Sequence[Found]) -> bool:
    """Whether no process has a step that any checkpoint was ever finished of."""
    unfinished = {step for found in heard for step in found.unfinished}
    saved = {step for found in heard for step in found.good} - unfinished
    return not saved and not any(found.refused for found in heard)


def _owners(parts: Iterable[str]) -> str:
    names = [part.removeprefix("worker-").replace("-", " ") for part in parts]  # "0", or "0 shard 1"
    return f"worker {names[0]}'s part" if len(names) == 1 else f"the parts of workers {', '.join(names)}"


def _refuse_other_tokenizer(trainer: Trainer, state: dict[str, Any]) -> None:
    """Of a text that has changed, bpe learns other tokens: the model would know none of them."""
    if state.get("data", trainer.data.settings()) != trainer.data.settings():
        raise UserError(
            "the checkpoint was trained with another tokenizer, and bpe learns it from the text: "
            "put the text back, or set data.tokenizer to the tokenizer.json of then (in data.cache)"
        )


def _take_counts(trainer: Trainer, state: dict[str, Any]) -> None:
    """Older checkpoints lack them: there all workers took every step."""
    trainer.tokens = state.get("tokens", trainer.tokens_per_step * trainer.step)
    trainer.own_steps = state.get("own_steps", trainer.step)


def _of_worker(fleet: dict[str, Any], worker: int) -> dict[str, Any]:
    """One worker's share of a fleet's state, so that any layout of processes can take it up."""
    own = f"worker{worker}"
    return {key: value for key, value in fleet.items() if not isinstance(value, dict) or key.split(".")[0] == own}
