"""The production model of a worker: a compiled diffusers pipeline behind one engine.

Owns the jobs in flight, the cache tiers and the LoRA files. `job_runner.py` runs a single job;
`pipeline_set.py` selects the pipelines.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import maskfx
from maskfx.distributed.ranks import Ranks
from maskfx.engine.engine import Engine
from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.engine.processes.placement import Placement
from maskfx.engine.step_runner import Step
from maskfx.errors import Cancelled, InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.encoder_cache import REMEMBER
from maskfx.pipelines.masks.masks import margin_sites
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.runtime.hardware.cpu_threads import give_back, sharing_cores
from maskfx.runtime.lora.files import SUFFIX
from maskfx.scheduling.rounds.elastic import ElasticRounds
from maskfx.scheduling.step_reports import StepMember, Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.conflicts import conflict
from maskfx.serve.messages import Failed, Job, Ready
from maskfx.serve.models.generated_images import edits_by_generator
from maskfx.serve.models.helper_choice import helper_pays, run_edits
from maskfx.serve.models.ip_adapter_files import load_ip_adapters, names_of
from maskfx.serve.models.job_errors import failed, is_lost
from maskfx.serve.models.job_runner import JobRunner, JobState
from maskfx.serve.models.model import Lost, Made, Tell
from maskfx.serve.models.model_counters import (
    adapter_counts,
    load_facts,
    mixed_counts,
    recording_counts,
    round_counts,
    weigh_levels,
)
from maskfx.serve.models.model_parts import (
    adapters_of,
    check_denoisers,
    loader_of,
    own_processes_of,
    packed_bytes_of,
    plans_of,
    programs_of,
    quality_of,
    tiers_of,
)
from maskfx.serve.models.model_source import load_pipeline, told_by
from maskfx.serve.models.pipeline_set import PipelineSet, compiling
from maskfx.serve.models.template_index import Recordings
from maskfx.serve.models.warmup import warm_up
from maskfx.serve.request import Pictures, Request, RequestKind

log = logging.getLogger(__name__)

DISK_LOOK = 5.0  # seconds for which the measured disk usage is reused


class PipelineModel:
    """Runs many jobs concurrently on one pipeline; see `maskfx.serve.models.model.Model`."""

    def __init__(self, settings: ServeSettings, tell: Tell, pipe: Pipeline | None = None) -> None:
        """Load the model that the settings name and warm it up.

        Args:
            settings: Settings of the server.
            `tell`: Callback for the events of all jobs; called from any thread.
            pipe: An already loaded pipeline, used instead of the one that the settings name.
        """
        if (why := conflict(settings)) is not None:
            raise InputError(why)
        self.settings, self.tell = settings, tell
        self._sittings: dict[str, JobState] = {}
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._disk = (-DISK_LOOK, 0)
        told: dict[str, object] = {}
        if pipe is None:
            told = told_by(settings.model)
            pipe = load_pipeline(
                settings.model, settings.dtype, settings.device, settings.controlnets
            )
            if settings.ip_adapters:
                load_ip_adapters(pipe, settings.ip_adapters, settings.image_encoder)
        self.tiers = tiers_of(settings, packed_bytes_of(settings, pipe))
        self.recordings = Recordings(self.tiers, settings.cache_dir)
        self.loader = loader_of(settings)
        programs = programs_of(settings)
        self._compiled = compiling(
            quality_of(settings),
            self.tiers,
            self.loader,
            programs,
            plans_of(settings),
            prepack=settings.prepack,
            inductor=settings.inductor,
            keep=settings.keep,
        )
        family = PipelineSet.of(pipe, self._compiled, told, names_of(settings.ip_adapters))
        check_denoisers(settings, family)
        self.adapters = adapters_of(settings, family)
        self.own_process = own_processes_of(settings, family)
        self._warm = False
        self.engine = self._engine(HelperProcesses() if settings.helpers == "on" else None)
        try:
            with sharing_cores():
                warmth = warm_up(family, self.engine)
            measure = settings.helpers == "auto" and settings.ranks == 1
            if measure and self._helper_pays(family, programs):
                self.engine.close()
                self.engine = self._engine(HelperProcesses())
                run_edits(family, self.engine, 1)  # starts them, so that no request waits for it
        except BaseException:
            self.engine.close()
            raise
        self.loads = load_facts(family)
        self.levels = weigh_levels(family, warmth.site)
        give_back()  # warm-up left an OpenMP pool on this thread, which no longer computes
        self._warm = True
        self.runner = JobRunner(family, self.engine, warmth, tell, settings.whole_quality)

    def _engine(self, outside: Placement | None, remember: int = REMEMBER) -> Engine:
        count = self.settings.max_num_seqs
        policy = maskfx.BatchPolicy(batch=count)
        settings, ranks = self.settings, self.settings.ranks
        return maskfx.Engine(
            policy,
            running=count,
            outside=outside,
            own_process=self.own_process,
            told=self._stepped,
            remember=remember,
            ranks=1 if ranks == 1 else Ranks(ranks, settings.rank_devices, settings.rank_backend),
            rank_timeout=settings.rank_timeout,
            rounds=ElasticRounds() if ranks > 1 else None,
            admission=None,  # the front end has decided by slack what it sends
        )

    def _helper_pays(self, family: PipelineSet, programs: Path | None) -> bool:
        def engine_with(outside: Placement) -> Engine:
            return self._engine(outside, remember=0)

        return helper_pays(family, engine_with, self.settings.max_num_seqs, programs)

    @property
    def family(self) -> PipelineSet:
        return self.runner.family

    # The Model interface.

    def ready(self) -> Ready:
        main, editor, settings = self.family.main, self.family.editor, self.settings
        signature, quality = main.signature, quality_of(settings)
        return Ready(
            family=type(main.plain).__name__,
            size=self.family.size(),
            multiple=self.family.multiple,
            steps=int(signature.number("num_inference_steps") or 0),
            guidance=signature.number(signature.guidance) if signature.guidance else None,
            takes=sorted(self._takes()),
            generates=self.runner.warmth.generates,
            site=self.runner.warmth.site,
            slots=settings.max_num_seqs,
            controls=signature.controls,
            nets=list(signature.names),
            ip_adapters=self.family.ip_adapters.names,
            margin=margin_sites(quality.margin, self.runner.warmth.site),
            every=quality.every,
            least=quality.least,
            strength=None if editor is None else editor.signature.number("strength"),
            whole=settings.whole_quality,
            patches=quality.patches is not None,
            on_disk=self.recordings.on_disk(),
            levels=self.levels,
            loads=self.loads,
        )

    def _takes(self) -> set[str]:
        found: set[str] = set()
        for member in (self.family.editor, self.family.generator):
            if member is None:
                continue
            found |= member.signature.takes()
            if len(pipeline_state_of(member.pipe).denoisers) > 1:
                found.add("late_control")
        if self.family.editor is not None:
            found |= {"image", "mask", "template"}
            found |= {"ahead"} if self.settings.limits.recordings else set()
        elif edits_by_generator(self.family):
            found |= {"image", "mask"}
        if self.runner.warmth.mixes:
            found.add("images")
        if self.runner.warmth.sketcher is not None:
            found.add("previews")
        if quality_of(self.settings).patches is not None:
            found.add("reuse")
        if self.settings.ranks > 1:
            found.add("late_parallel")
        if self.family.ip_adapters.adapters:
            found |= {"ip_adapters", "ip_scale"}
        return found | ({"lora"} if self.adapters is not None else set())

    def start(self, job: Job, pictures: Pictures) -> None:
        state = JobState(job, pictures)
        thread = threading.Thread(target=self._serve, args=(state,), daemon=True)
        with self._lock:
            self._sittings[job.id] = state
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the process can't start another thread
            self._over(state, thread)
            raise

    def cancel(self, id: str) -> None:
        with self._lock:
            state = self._sittings.get(id)
        if state is not None:
            state.cancel()

    def aside(self) -> list[str]:
        with self._lock:
            return [id for id, state in self._sittings.items() if state.waits]

    def forget(self, template: str) -> None:
        """Unpin and drop a template by its client name or by the name of a recording.

        Recordings that another client name refers to are kept.
        """
        names = [*self.recordings.forget(template), template]
        for name in names:
            self.family.library.forget(name)

    def prefetch(self, template: str) -> None:
        entries = self.recordings.entries(template)
        self.family.library.prefetch_waiting([k for k in entries if self.tiers.where(k) is None])

    def register_adapter(self, name: str) -> None:
        if self.adapters is not None and self.settings.lora_dir is not None:
            self.adapters.register(name, self.settings.lora_dir / f"{name}{SUFFIX}")

    def remove_adapter(self, name: str) -> None:
        if self.adapters is not None and name in self.adapters:
            self.adapters.remove(name)

    def cache(self) -> dict[str, int]:
        now = self.tiers.counters()
        found = {f"hits.{tier.value}": count for tier, count in now.hits.items()}
        found |= {f"evictions.{tier.value}": count for tier, count in now.evictions.items()}
        found |= {f"bytes.{tier.value}": count for tier, count in now.nbytes.items()}
        found |= {"misses": now.misses, "corrupt": now.corrupt, "expired": now.expired}
        found |= {"loads": now.loads, "lost": now.lost, **self._patches()}
        found |= {"read_bytes": now.read_bytes, "read_us": int(1e6 * now.read_seconds)}
        if self.adapters is not None:
            found |= adapter_counts(self.adapters, self.runner.family)
        if self.own_process.names:
            found |= {f"nets.{k}": v for k, v in asdict(self.engine.services.counts()).items()}
        if self._warm and self.engine.rounds is not None:
            found |= round_counts(self.engine)
        if self._warm:
            found |= recording_counts(self.engine) | mixed_counts(self.family)
        return found | self._stored()

    def _patches(self) -> dict[str, int]:
        """Return the sites of patches that were computed and kept, of all and by stretch.

        Empty if no patches are reused.
        """
        if quality_of(self.settings).patches is None or not self._warm:
            return {}
        members = {id(m): m for m in (self.family.editor, self.family.generator) if m is not None}
        counts = [pipeline_state_of(member.pipe).patches for member in members.values()]
        computed, total = (round(sum(getattr(c, n) for c in counts)) for n in ("computed", "total"))
        found = {"patches.computed": computed, "patches.kept": total - computed}
        stretches = [dict(one.stretches) for one in counts]
        for number in sorted({n for own in stretches for n in own}):
            each = [own[number] for own in stretches if number in own]
            computed, total = (
                round(sum(getattr(c, n) for c in each)) for n in ("computed", "total")
            )
            found[f"stretches.{number}.computed"] = computed
            found[f"stretches.{number}.kept"] = total - computed
        return found

    def _stored(self) -> dict[str, int]:
        """Return what the store holds and how often it failed; empty without one.

        The bytes are kept for a while, so that not every heartbeat lists a directory.
        """
        store = self.tiers.store
        if store is None:
            return {}
        looked, nbytes = self._disk
        if time.monotonic() - looked >= DISK_LOOK:
            nbytes = store.total_bytes()
            self._disk = time.monotonic(), nbytes
        counters = store.counters
        failures = counters.failed_reads + counters.failed_writes
        return {"bytes.disk": nbytes, "failures": failures}

    def close(self) -> None:
        with self._lock:
            threads, states = list(self._threads), list(self._sittings.values())
        for state in states:
            if state.job.request.kind is RequestKind.AHEAD:
                state.cancel()
        for thread in threads:
            thread.join()
        self.engine.close()
        if self.adapters is not None:
            self.adapters.close()
        if self.loader is not None:
            self.loader.close()
        self.tiers.close()
        self.recordings.close()

    # Running one job.

    def _serve(self, state: JobState) -> None:
        """Run one job on its thread and send its result."""
        job = state.job
        answer: Made | Failed | None = None
        try:
            answer = self._named(job.request.template, self.runner.made(state))
        except Cancelled as error:
            log.info("job %s was cancelled", job.id)
            answer = Failed(job.id, job.attempt, "out_of_resources", str(error))  # by the engine
        except BaseException as error:
            if is_lost(error):
                self.tell(Lost(str(error)))  # the receiver ends the process
            answer = failed(job, error)
        try:
            if not state.cancelled:
                if answer is not None:
                    self.tell(answer)
            elif isinstance(answer, Made) and answer.template and is_pinned(job.request):
                # the front end doesn't know this recording, so it would stay pinned forever
                self.forget(answer.template)
        finally:
            self._over(state, threading.current_thread())

    def _over(self, state: JobState, thread: threading.Thread) -> None:
        with self._lock:
            if self._sittings.get(state.job.id) is state:
                del self._sittings[state.job.id]
            self._threads.discard(thread)

    def _named(self, template: str | None, made: Made) -> Made:
        """Register the recording under the client's template name and return it with that name."""
        if made.template is None or template is None:
            return made
        keys = self.family.library.keys(made.template)
        pinned = made.pixels is None  # an explicit recording request, not a side effect of an edit
        self.recordings.add(template, made.template, keys, pinned=pinned)
        return replace(made, template=template)

    def _stepped(self, step: Step) -> None:
        # steps of the warm-up include captures and would distort the fitted costs, and steps of
        # idle recordings are those of no request
        if self._warm and not step.idle:
            members, ranks = members_of(step), self.settings.ranks
            self.tell(Stepped(step.seconds, members, step.bubble, step.degree, ranks))


def is_pinned(request: Request) -> bool:
    """Return True if a request's recording is pinned until it is forgotten."""
    return request.kind is RequestKind.RECORD


def members_of(step: Step) -> list[StepMember]:
    """Return what a step's requests computed, for the cost model."""
    return [
        StepMember(
            m.kind,
            m.sites,
            m.whole // max(1, m.samples),
            m.samples,
            m.first,
            None if m.work is None else m.work.sites,
            None if m.work is None else m.work.pairs,
        )
        for m in step.members
    ]
