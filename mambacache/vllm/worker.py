"""Give vLLM's worker states and rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from mambacache.kernels.state_pool import StatePool, StateTensor, state_bytes
from mambacache.plan import Transfer
from mambacache.runner.host_tier import HostTier
from mambacache.vllm.config import is_cpu
from mambacache.vllm.files import RankFiles, folders, rank_identity, tell_identity
from mambacache.vllm.layers import check_all_ours, check_no_drafter, check_stage
from mambacache.vllm.log import logger
from mambacache.vllm.sizing import Sizes, host_slots, least_of_all_ranks, log_slots, pool_blocks, write_sizes
from mambacache.vllm.soundness import Answer, answer, attach
from mambacache.vllm.step_context import StepContext
from mambacache.vllm.transfers import Ends
from mambacache.vllm.warm_up import warm_up


class Mixin:
    """Extends a vLLM worker."""

    _answer: Answer | None = None
    _host_tier: HostTier | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        layers = check_all_ours(runner.compilation_config.static_forward_context)
        check_no_drafter(layers, runner.get_model())
        if self.parallel_config.pipeline_parallel_size > 1:
            check_stage(runner.compilation_config.static_forward_context)
        tensors = [layer.state_tensors() for layer in layers]
        token_log = [layer.log_tensors() for layer in layers]
        size, token_log_size = state_bytes(tensors), state_bytes(token_log)
        blocks = least_of_all_ranks(pool_blocks(self.vllm_config, size, token_log_size, runner.device))
        slots = log_slots(self.vllm_config, blocks)
        on_host = least_of_all_ranks(host_slots(self.vllm_config, size))
        if self.rank == 0:
            write_sizes(self.vllm_config, Sizes(blocks, on_host, size))
        tagged = getattr(self, "_maybe_get_memory_pool_context", None)  # sleep mode frees this memory
        with tagged(tag="kv_cache") if tagged is not None else nullcontext():
            pools = StatePool(tensors, blocks, runner.device), StatePool(token_log, slots, runner.device)
        self.step_context = StepContext(layers, *pools, self.vllm_config.scheduler_config.max_num_seqs)
        logger.info(
            "mambacache: %d states of %.2f MB in %.2f GB, and %d token logs in %.2f GB, on this rank",
            blocks, size / 1e6, (blocks + 1) * size / 1e9, slots, (slots + 1) * token_log_size / 1e9,
        )  # fmt: skip
        if on_host:
            self._keep_on_host(on_host, tensors)
        runner.get_model().mambacache = self.step_context
        if is_cpu():
            _attach_v1(runner, self.step_context)
        elif runner.rejection_sampler is not None:
            from mambacache.vllm.model_state import UpToTheLog

            runner.rejection_sampler = UpToTheLog(runner.rejection_sampler)

    def _keep_on_host(self, slots: int, tensors: Sequence[Sequence[StateTensor]]) -> None:
        config, paths, runner = self.vllm_config, folders(self.vllm_config), self.model_runner
        found = rank_identity(config, self.rank, runner.get_model(), tensors, runner.device) if paths else None
        try:
            if found is not None:
                tell_identity(config, self.rank, found)
            files = RankFiles(paths[self.rank]) if paths else None
            self._host_tier = HostTier([self.step_context.pool], [slots], files, option="state_host_bytes")
            self._ends = Ends(config, self.rank, new=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"mambacache: the host tier cannot start: {error}") from error
        size = self.step_context.pool.block_bytes
        logger.info("mambacache: %d states in %.2f GB of host memory, on this rank", slots, (slots + 1) * size / 1e9)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        if not is_cpu() and self.vllm_config.kernel_config.enable_jit_warmup:
            warm_up(self.model_runner, self.step_context, self.vllm_config)
        return super().compile_or_warm_up_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.step_context.receive(getattr(scheduler_output, "mambacache", None), scheduler_output.finished_req_ids)
        self._copy(getattr(scheduler_output, "mambacache_transfers", ()))
        question = getattr(scheduler_output, "mambacache_question", None)
        if question is not None:
            self._answer = answer(question, self.step_context.pool, self.model_runner.kv_caches, self.cache_config)
        try:
            return self._answered(super().execute_model(scheduler_output, *args, **kwargs))
        finally:
            self.step_context.end()

    def _copy(self, transfers: Sequence[Transfer]) -> None:
        """Launch transfers behind all steps so far, and note transfers that are over."""
        if self._host_tier is None:
            return
        self._host_tier.launch(transfers)
        ended = self._host_tier.ended()
        for transfer, failed in ended.items():
            self._ends.note(transfer.number, failed)
        self._host_tier.forget(ended)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._answered(super().sample_tokens(*args, **kwargs))

    def _answered(self, output: Any) -> Any:
        if output is None or self._answer is None:
            return output
        found, self._answer = self._answer, None
        return attach(output, found)


def _attach_v1(runner: Any, context: StepContext) -> None:
    """Wrap two methods of runner V1, which lacks a hook."""
    prepare, threshold = runner._prepare_inputs, runner.calculate_reorder_batch_threshold

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = prepare(scheduler_output, num_scheduled_tokens)
        rows = runner.input_batch.num_reqs
        context.begin(runner.input_batch.req_ids[:rows], num_scheduled_tokens[:rows])
        return result

    def calculate_reorder_batch_threshold() -> None:
        threshold()
        runner.reorder_batch_threshold = 1  # decode rows first

    runner._prepare_inputs = prepare_inputs
    runner.calculate_reorder_batch_threshold = calculate_reorder_batch_threshold


def __getattr__(name: str) -> Any:
    """Make `StateWorker` from this build's worker."""
    if name != "StateWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, cls = ("cpu_worker", "CPUWorker") if is_cpu() else ("gpu_worker", "Worker")
    base = getattr(import_module(f"vllm.v1.worker.{module}"), cls)
    return globals().setdefault("StateWorker", type("StateWorker", (Mixin, base), {"__module__": __name__}))
