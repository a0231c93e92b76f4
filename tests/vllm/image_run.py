"""Send requests with images and videos to a tiny model in vLLM with the plugin: `python image_run.py NAME DIRECTORY`.

A NAME that ends in "+ngram" or "+mtp" has vLLM verify drafts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from inspect import signature
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import family_run
import numpy as np
import torch
from composite_models import BANKS, SIDE, add_processor, bank_of
from family_run import DRAFTS, OPTIONS, count_drafts, draft_from
from PIL import Image
from real_shapes import add_predictor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata
from watched import LAST_ANSWER, check_idle

from engine_driver import Original, tokens_of
from tiny_models import VOCABULARY

TOLERANCE = 1e-3
"""Log-probabilities may differ by less. After another image they differ by ten times as much.

The greedy tokens alone are too coarse: they can stay the same when a state of another image is read.
"""
ALONG = {"input_ids": 1, "mm_token_type_ids": 1}
"""In these dimensions a prompt's next piece extends an input of the Hugging Face model. Other inputs have 0."""


class Picture(NamedTuple):
    """Describe a random image that becomes `across` times `down` tokens, unless it is resized."""

    seed: int
    across: int
    down: int

    @property
    def pixels(self) -> np.ndarray:
        """Return [height, width, 3], bytes."""
        return enlarged(self.seed, self.down, self.across)

    @property
    def given(self) -> Image.Image:
        """Return the form that vLLM takes."""
        return Image.fromarray(self.pixels)


class Clip(NamedTuple):
    """Describe a random video of `across` times `down` tokens for each pair of frames.

    Each pair has four tokens more: two are its time, and one stands before and one behind its other tokens.
    """

    seed: int
    frames: int
    across: int
    down: int

    @property
    def pixels(self) -> np.ndarray:
        """Return [frames, height, width, 3], bytes."""
        return enlarged(self.seed, self.frames, self.down, self.across)

    @property
    def metadata(self) -> dict[str, Any]:
        count = self.frames
        return {"fps": 4.0, "duration": count / 4, "total_num_frames": count, "frames_indices": [*range(count)]}

    @property
    def given(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the form that vLLM takes."""
        return self.pixels, self.metadata | {"do_sample_frames": False}


def enlarged(seed: int, *shape: int) -> np.ndarray:
    """Return random colours, each `SIDE` pixels across and down."""
    colours = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    return colours.repeat(SIDE, -3).repeat(SIDE, -2)


Marks = dict[type, str]
"""The text stands for an image or a video."""
QWEN: Marks = {
    Picture: "<|vision_start|><|image_pad|><|vision_end|>",
    Clip: "<|vision_start|><|video_pad|><|vision_end|>",
}
INTERN_S2 = {
    "interns2_preview": "InternS2PreviewForConditionalGeneration",
    "interns2_mobius": "InternS2MobiusForConditionalGeneration",
}
"""These are the classes of Intern-S2. In transformers they are Qwen3.5's."""
MINICPM: Marks = {Picture: "<|image_pad|>"}
NANO = "nemotron_nano_vl"
MARKS: dict[str, Marks] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", *INTERN_S2), QWEN),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), MINICPM),
    "lfm2_vl": {Picture: "<image>"},
    NANO: {Picture: "<image>"},
}


class Prompt(NamedTuple):
    """Hold text, images and videos, in their order."""

    pieces: tuple[tuple[int, ...] | Picture | Clip, ...]

    def media(self, kind: type) -> list[Any]:
        return [piece for piece in self.pieces if isinstance(piece, kind)]


class Scene(NamedTuple):
    """Hold two prompts with the same tokens and different last images, and the hits that they must have.

    Attributes:
        prompt: the first prompt.
        other: the prompt with another last image or video.
        before: the tokens of `prompt` that `other` hits, up to the last boundary before that image.
        again: the tokens that both hit the second time.
        asked: the tokens that both hit with another question, up to the last boundary before it.
    """

    prompt: Prompt
    other: Prompt
    before: int
    again: int
    asked: int

    def with_question(self, seed: int) -> tuple[Prompt, Prompt]:
        question = tuple(tokens_of(seed, 30))
        return Prompt((*self.prompt.pieces[:-1], question)), Prompt((*self.other.pieces[:-1], question))


def scene(seed: int, *parts: int | tuple[int, ...], hits: tuple[int, int, int]) -> Scene:
    """Return a scene of random text, images and videos.

    Args:
        parts: a number of tokens for text, (across, down) for an image, (frames, across, down) for a video.
        hits: the last three attributes of the scene.
    """

    def piece(part: int | tuple[int, ...], own: int) -> tuple[int, ...] | Picture | Clip:
        if isinstance(part, int):
            return tuple(tokens_of(own, part))
        return Picture(own, *part) if len(part) == 2 else Clip(own, *part)

    pieces = [piece(part, 100 * seed + place) for place, part in enumerate(parts)]
    last = max(place for place, part in enumerate(parts) if not isinstance(part, int))
    changed = pieces[last]._replace(seed=-pieces[last].seed % 9973)
    return Scene(Prompt((*pieces,)), Prompt((*pieces[:last], changed, *pieces[last + 1 :])), *hits)


# An image has a token before it and one behind it.
SCENES = (
    scene(1, 5, (4, 3), 60, hits=(0, 64, 0)),  # inside the first block
    scene(2, 40, (10, 7), 30, hits=(0, 128, 64)),  # 64 lies inside the image
    scene(3, 200, (8, 8), 40, hits=(192, 256, 256)),
    scene(4, 20, (9, 6), 30, (6, 9), 20, hits=(64, 128, 128)),
    scene(5, 10, (16, 12), 20, hits=(0, 192, 192)),  # no step has room for the image
    scene(6, 62, (4, 16), 10, hits=(0, 128, 128)),  # from the last token of a block to the end of another
    scene(7, 64, (2, 2), 58, hits=(64, 64, 64)),
    scene(8, 70, (8, 4, 3), 30, hits=(64, 128, 128)),
    scene(9, 30, (3, 3), 10, (4, 6, 5), 40, hits=(0, 128, 64)),
)
# Nemotron Nano resizes images of fewer or more patches than it takes: these have 6 tokens and 252.
RESIZED = (
    scene(10, 70, (2, 1), 60, hits=(64, 128, 64)),
    scene(11, 5, (20, 16), 30, hits=(0, 256, 256)),
)


# An image has 63 tokens or 64, with 5 around them. A large image has 4 slices too, each with as many and 2 around them.
# A prompt has one image: vLLM 0.32 numbers a second image 0 where it has processed the first before.
SLICED = (
    scene(1, 5, (4, 3), 60, hits=(0, 128, 64)),
    scene(3, 200, (2, 2), 40, hits=(192, 256, 256)),
    scene(8, 40, (8, 8), 30, hits=(0, 384, 320)),
    scene(5, 10, (16, 12), 20, hits=(0, 320, 320)),
)


def answer_of(output: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of vLLM's answer and their log-probabilities."""
    [answer] = output.outputs
    pairs = zip(answer.logprobs, answer.token_ids, strict=True)
    return list(answer.token_ids), torch.tensor([each[token].logprob for each, token in pairs])


class WithImages(Original):
    """Run the Hugging Face model with its vision tower and its processor."""

    def __init__(self, text: Path, whole: Path, marks: Marks, device: str = "cpu") -> None:
        super().__init__(text)
        self._module = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32).eval().to(device)
        self._processor = AutoProcessor.from_pretrained(whole)
        self._has_kinds = "mm_token_type_ids" in signature(self._module.forward).parameters
        self._marks = marks
        self._prompt = Prompt(())

    def asked(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """Return the prompt as vLLM takes it, with one token for each image and each video."""
        media = {"image": prompt.media(Picture), "video": prompt.media(Clip)}
        words = self._processor.tokenizer
        tokens = [
            words(self._marks[type(each)])["input_ids"] if type(each) in self._marks else each for each in prompt.pieces
        ]
        return {
            "prompt_token_ids": [*chain(*tokens)],
            "multi_modal_data": {name: [each.given for each in given] for name, given in media.items() if given},
            **options,
        }

    def inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        parts = [self._inputs(piece) for piece in prompt.pieces]
        keys = {key for part in parts for key in part}
        along = ALONG | ({"pixel_values": -1} if "target_sizes" in keys else {})
        return {key: torch.cat([part[key] for part in parts if key in part], along.get(key, 0)) for key in keys}

    def _inputs(self, piece: tuple[int, ...] | Picture | Clip) -> dict[str, torch.Tensor]:
        if type(piece) not in self._marks:
            ids = torch.tensor([piece])
            return {"input_ids": ids} | ({"mm_token_type_ids": torch.zeros_like(ids)} if self._has_kinds else {})
        media: dict[str, Any] = {"return_mm_token_type_ids": self._has_kinds}
        if isinstance(piece, Picture):
            media["images"] = [piece.given]
        else:
            media["videos"] = [torch.from_numpy(piece.pixels).movedim(-1, 1)]
            media |= {"video_metadata": [VideoMetadata(**piece.metadata)], "do_sample_frames": False}
        inputs = {**self._processor(text=[self._marks[type(piece)]], return_tensors="pt", **media)}
        del inputs["attention_mask"]
        return inputs

    def check_prompt(self, prompt: Prompt, output: Any) -> torch.Tensor:
        """Fail unless an answer is greedy and has the right log-probabilities. Return these."""
        tokens, found = answer_of(output)
        right = self.right(prompt, output.prompt_token_ids, tokens)
        self.check(output.prompt_token_ids, tokens)
        assert (found - right).abs().max() < TOLERANCE, (found, right)
        return found

    def right(self, prompt: Prompt, expanded: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of an answer's tokens behind a prompt, `expanded` as the model takes it."""
        self._prompt = prompt
        return self.after(expanded, answer).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        key = (self._prompt, *tokens)
        if key not in self._logits:
            inputs = self.inputs(self._prompt)
            prompt, ids = inputs["input_ids"], torch.tensor([tokens])
            assert torch.equal(ids[:, : prompt.shape[1]], prompt), (ids.tolist(), prompt.tolist())
            kinds = inputs.pop("mm_token_type_ids", None)
            if kinds is not None:  # the answer is text
                inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, ids.shape[1] - kinds.shape[1]))
            inputs = {name: each.to(self._module.device) for name, each in (inputs | {"input_ids": ids}).items()}
            self._logits[key] = self._module(**inputs, use_cache=False).logits[0].cpu()
        return self._logits[key]


def save(name: str, directory: Path) -> tuple[Path, Path]:
    """Save a model that never answers with a mark of an image.

    Returns:
        The folder that vLLM serves, and the folder that transformers reads.
    """
    served = family_run.save("qwen3_5_moe" if name in INTERN_S2 else name, directory)
    if name == "qwen3_5_moe" or name in INTERN_S2:
        add_processor(served)
    silence_marks(served)
    if name == NANO:
        return served, served / "images"
    return (save_intern_s2(name, directory) if name in INTERN_S2 else served), served


def save_intern_s2(name: str, directory: Path) -> Path:
    """Save a Qwen3.5 as Intern-S2 too. In Mobius several layers share the experts: both models then share them."""
    weights, settings = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    settings["architectures"] = [INTERN_S2[name]]
    if name == "interns2_mobius":
        settings["text_config"]["num_blocks"] = BANKS
        banks = {key: bank_of(key.replace("language_model.", "")) for key in weights}
        shared = {bank: weights[key] for key, bank in banks.items()}
        weights = {key: shared[bank].clone() if bank else weights[key] for key, bank in banks.items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        weights = {
            bank.replace("model.", "model.language_model.", 1) if bank else key: weights[key]
            for key, bank in banks.items()
        }
    served = directory / "served"
    served.mkdir()
    (served / "config.json").write_text(json.dumps(settings))
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    add_processor(served)
    return served


def silence_marks(served: Path) -> None:
    """Change the output layer of a saved model, so that no answer holds a mark of an image."""
    path = served / "model.safetensors"
    weights = load_file(path)
    heads = (key for key in weights if key.endswith("lm_head.weight"))
    output = next(heads, "model.language_model.embed_tokens.weight")
    weights[output][VOCABULARY:] = 0
    save_file(weights, path, metadata={"format": "pt"})


def keep_features() -> None:
    """Have vLLM's Nemotron Nano keep the features of images in float32.

    It casts them to bfloat16 even where the projector behind them has float32, which then fails.
    """
    from vllm.model_executor.models import nano_nemotron_vl

    nano_nemotron_vl.torch = SimpleNamespace(**vars(torch) | {"bfloat16": torch.float32})


class Check:
    """Ask vLLM, and fail unless tokens, log-probabilities and hits are right."""

    def __init__(self, llm: Any, original: WithImages, max_tokens: int) -> None:
        from vllm import SamplingParams

        self._llm, self._original = llm, original
        self._params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, *cases: tuple[Prompt, int], **options: Any) -> list[torch.Tensor]:
        """Submit prompts together, each with the tokens that it must hit. Return the log-probabilities."""
        asked = [self._original.asked(prompt, **options) for prompt, _ in cases]
        outputs = self._llm.generate(asked, self._params, use_tqdm=False)
        found = [(len(output.prompt_token_ids), output.num_cached_tokens) for output in outputs]
        assert [hit for _, hit in found] == [hit for _, hit in cases], f"{found} (prompt, hit): {cases}"
        self.answers |= {tuple(output.prompt_token_ids): list(output.outputs[0].token_ids) for output in outputs}
        return [self._original.check_prompt(prompt, output) for (prompt, _), output in zip(cases, outputs, strict=True)]


def check_one_by_one(check: Check, each: Scene) -> None:
    [first] = check((each.prompt, 0))
    [other] = check((each.other, each.before))
    assert (first - other).abs().max() > 10 * TOLERANCE, "the image makes no difference"
    for prompt in (each.prompt, each.other):
        check((prompt, each.again))
    for prompt in each.with_question(1):
        check((prompt, each.asked))


def main(name: str, directory: Path) -> None:
    from vllm import LLM

    name, _, drafts = name.partition("+")
    family_run.let_run_on_a_cpu(name)
    if name == NANO:
        keep_features()
    (served, whole), marks = save(name, directory), MARKS[name]
    if drafts == "mtp":
        add_predictor(served, large=1.0)
    llm = LLM(str(served), **OPTIONS | {"skip_tokenizer_init": False} | DRAFTS[drafts])
    core = llm.llm_engine.engine_core.engine_core
    counts = count_drafts(core.scheduler.prefix_cache)
    check = Check(llm, WithImages(directory, whole, marks), max_tokens=12 if drafts else 8)
    text = Prompt((tuple(tokens_of(99, 150)),))
    check((text, 0))
    known = SLICED if marks is MINICPM else (*SCENES, *RESIZED) if name == NANO else SCENES
    scenes = [each for each in known if Clip in marks or not each.prompt.media(Clip)]
    for each in scenes:
        check_one_by_one(check, each)
    if drafts:
        draft_from(check.answers, core.scheduler)
    # All run at once, and nothing is known yet under this salt.
    cold = [(each.prompt, 0) for each in scenes] + [(each.other, each.before) for each in scenes]
    check((text, 0), *cold, cache_salt="a")
    check((text, 128), *((prompt, each.again) for each in scenes for prompt in each[:2]), cache_salt="a")
    assert not drafts or min(counts.values()) > 20, counts
    check_idle(core.scheduler.prefix_cache)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
