"""The data types between a dataset row and the loss.

``Example`` → ``Prompt`` → ``Completion`` → ``Group``: a dataset row, the row prepared for one
model, one sampled completion, and the G completions of one prompt with their scores.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from PIL import Image

from vlm_grpo.media.frame_strip import build_strip, fit_strip
from vlm_grpo.media.images import TableCell, decode_image
from vlm_grpo.media.videos import decode_frames
from vlm_grpo.utils.chat import Turn
from vlm_grpo.utils.parallel_calls import ValueCache, call_all, share_calls

ImageChange = Callable[[Image.Image], Image.Image]
StopReason = Literal["eos", "stop", "length", "turns"]
TARGET_COLUMN = "completion"
"""Column of ``Example.meta`` with the text that supervised steps train on."""


@dataclass(frozen=True)
class ImageRef:
    """A reference to one image of an example, or to a clip (``VideoRef``) among its images.

    Pixels are decoded by each call of ``load`` and not kept, so that large datasets fit in memory.
    Sizes are (width, height) in pixels.
    """

    name: str  #: in messages: a path, or a row of a table
    size: tuple[int, int]  #: of the original image
    resized_size: tuple[int, int]  #: after the family's resize; ``size`` until a policy sets it
    path: Path | None = None  #: file of the encoded image
    data: bytes | TableCell | None = None  #: encoded bytes, or where they are
    #: change of the resized image, such as noise, which ``load`` leaves out; None: there is none
    change: ImageChange | None = None
    kind: ClassVar[Literal["image", "video"]] = "image"
    num_frames: ClassVar[int] = 0  #: number of frames of a clip that the model sees; 0: an image

    @property
    def picture_size(self) -> tuple[int, int]:
        """Width and height of what ``load`` returns, in pixels."""
        return self.size

    @property
    def origin(self) -> ImageRef:
        """The reference to the image of the data; that of a part of an image is the whole."""
        return self

    @property
    def clean(self) -> ImageRef:
        """The reference to the image without its change."""
        return self if self.change is None else replace(self, change=None)

    def read_bytes(self) -> bytes:
        """Return the encoded bytes; raise ``ValueError`` if they cannot be read from their file."""
        if self.path is None:
            data = self.data or b""
            return data if isinstance(data, bytes) else data.read()
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.kind} {self.name} cannot be read: {error}") from error

    def load(self) -> Image.Image:
        """Decode the image to RGB; a ``ValueError`` names it if it is missing or has changed."""
        try:
            image = decode_image(self.path or io.BytesIO(self.read_bytes()))
        except ValueError as error:
            raise ValueError(f"image {self.name} cannot be read: {error}") from error
        if image.size != self.size:
            raise ValueError(
                f"image {self.name} has changed: it has {image.width}x{image.height} pixels "
                f"instead of {self.size[0]}x{self.size[1]}"
            )
        return image


@dataclass(frozen=True)
class VideoRef(ImageRef):
    """A reference to one clip of an example; its sizes are those of each frame."""

    #: time of each frame that the model sees, in seconds from the clip's start
    times: tuple[float, ...] = ()
    seconds: float = 0.0  #: length of the clip
    #: the frames as encoded images; empty: they are decoded from ``path`` or ``data``
    frames: tuple[ImageRef, ...] = ()
    kind: ClassVar[Literal["image", "video"]] = "video"

    @property
    def num_frames(self) -> int:
        return len(self.times)

    @property
    def picture_size(self) -> tuple[int, int]:
        return fit_strip(self.size, self.num_frames)[0]

    def read_bytes(self) -> bytes:
        return b"".join(f.read_bytes() for f in self.frames) or super().read_bytes()

    def load_frames(
        self, fit: Callable[[Image.Image], Image.Image] = lambda frame: frame
    ) -> list[Image.Image]:
        """Decode the frames to RGB, and ``fit`` each of them as soon as it is decoded."""
        if self.frames:
            return [fit(frame.load()) for frame in self.frames]
        try:
            source = self.path or io.BytesIO(self.read_bytes())
            return decode_frames(source, self.times, self.size, fit)
        except ValueError as error:
            raise ValueError(f"video {self.name} cannot be read: {error}") from error

    def load(self) -> Image.Image:
        """Return some of the frames side by side, for people."""
        shown = fit_strip(self.size, self.num_frames)[1]
        return build_strip(self.load_frames(lambda frame: frame.resize(shown)))


@dataclass(frozen=True)
class Example:
    """One row of a dataset."""

    id: str  #: unique name within the dataset; it identifies the example's group
    #: zero or more images and clips, in the order of their ``<image>`` in the history and question;
    #: without any ``<image>`` there, they stand before the first question
    images: tuple[ImageRef, ...]
    question: str  #: the question, or for grounding the expression to locate
    answer: Any  #: the gold answer in the task's form; boxes are xyxy in original pixels
    #: the row's other columns, for use by tasks and rewards
    meta: Mapping[str, Any] = field(default_factory=dict)
    #: where it was read ("train.jsonl:3"), for messages; empty: unknown
    location: str = field(default="", compare=False)
    #: the turns of the chat before the question, perhaps with a system prompt first
    history: tuple[Turn, ...] = ()
    #: name of its source in a mixture, which is also the start of its id; in rows that name their
    #: task, followed by "/" and that name. Empty: the run has one source
    source: str = ""

    @property
    def name(self) -> str:
        """The example's name in messages: its location, if known, and its id."""
        return f"{self.location}: example {self.id}" if self.location else f"example {self.id}"

    def with_resized_sizes(self, sizes: Iterable[tuple[int, int]]) -> Example:
        """Return the example with the ``resized_size`` of each of its images."""
        pairs = zip(self.images, sizes, strict=True)
        return replace(self, images=tuple(replace(i, resized_size=size) for i, size in pairs))

    def with_changes(self, choose: Callable[[int], ImageChange]) -> Example:
        """Return the example with a change of each image, chosen by the image's number."""
        pairs = enumerate(self.images)
        return replace(self, images=tuple(replace(image, change=choose(n)) for n, image in pairs))


Examples = Sequence[Example]


@dataclass(frozen=True)
class LabeledBoxes:
    """The labeled boxes of one image in a detection dataset, about which a task can ask."""

    boxes: tuple[tuple[float, float, float, float], ...]  #: xyxy in pixels of the original image
    labels: tuple[str, ...]  #: each box's category
    categories: tuple[str, ...]  #: all categories of the dataset
    #: categories of which the image also shows a crowd or an object that is hard to recognize:
    #: neither their number nor their boxes are known
    ignored: tuple[str, ...] = ()
    masks: tuple[Any, ...] = ()  #: each box's mask: run lengths or polygons of COCO; None: none

    def group_by_label(self) -> dict[str, list[list[float]]]:
        """Return the boxes of each category that is fully known."""
        groups: dict[str, list[list[float]]] = {}
        for box, label in zip(self.boxes, self.labels, strict=True):
            if label not in self.ignored:
                groups.setdefault(label, []).append(list(box))
        return groups


@dataclass(frozen=True)
class Prompt:
    """An example prepared as input of one model."""

    example: Example  #: the example, with the ``resized_size`` of its images set
    text: str  #: the prompt after the chat template, before tokenization
    token_ids: tuple[int, ...]  #: (T_prompt,) the prompt's tokens, with image placeholders expanded
    #: inputs of the family's vision tower, empty without images (for Qwen: ``pixel_values``
    #: (patches, values) and ``image_grid_thw`` (images, 3), and of clips ``pixel_values_videos``
    #: and ``video_grid_thw``)
    vision: Mapping[str, Any]
    image_decodes: int = 0  #: number of images that were decoded for it; others came from a cache
    #: another form of the prompt, for a part of the group; None: there is none
    variant: Prompt | None = None
    #: of another form of a prompt, the name and strength of the change
    label: tuple[str, int] | None = None
    #: of a prompt that continues another: it, what was sampled (without a text) and observed, in
    #: turn; their images are encoded apart, and ``vision`` is empty
    parts: tuple[Prompt, ...] = ()
    start: EpisodeStart | None = None  #: of its episodes; None: its completions call no tools


@dataclass(frozen=True)
class EpisodeStart:
    """The environment of a prompt before its first completion, and its limits."""

    state: Any  #: the environment, for a worker process
    max_turns: int
    masks_long: bool  #: whether an episode of more turns is left out of the loss
    end_of_call: str  #: string with which a call ends


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Observed:
    """What the model reads after a call."""

    text: str  #: with ``<image>`` for each image
    images: tuple[ImageRef, ...] = ()
    is_error: bool = False
    reward: float = 0.0  #: that the environment's server gave for the call


@dataclass(frozen=True)
class EpisodeTurn:
    """One text that the model sampled, and what it read next."""

    text: str
    call: ToolCall | None = None  #: None: it made none, or one that cannot be read
    observed: Observed | None = None  #: None: the episode ended with this turn

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON holds them, with the sizes of the images instead of these."""
        row, seen = asdict(self), self.observed
        if seen is not None:
            row["observed"]["images"] = [list(image.size) for image in seen.images]
        return row


@dataclass(frozen=True)
class Observation:
    """What an environment answered within a completion: tokens that the policy reads only."""

    start: int  #: number of the completion's tokens before it, at least 1 and fewer than all
    prompt: Prompt  #: its text, tokens and images


@dataclass(frozen=True)
class Completion:
    """One sampled completion of a prompt; a server that returns only texts gives no tokens.

    Behind a prompt with an environment it is an episode: ``observations`` stand between its tokens.
    """

    token_ids: tuple[int, ...]  #: (T,) the sampled tokens, including the end-of-sequence token
    #: (T,) log-probability of each token under the sampling distribution, in nats
    logprobs: tuple[float, ...]
    text: str  #: the decoded tokens, without special tokens except those that belong to an answer
    #: reason for the end: end-of-sequence token, stop string, length limit, or number of turns
    stop: StopReason
    #: (T,) entropy of the sampling distribution at each token, in nats
    entropies: tuple[float, ...] = ()
    #: number of steps after which the weights that sampled it were published; None: they were the
    #: policy's own
    version: int | None = None
    #: label of the form of the prompt that it was sampled for; None: its group's own
    variant: tuple[str, int] | None = None
    observations: tuple[Observation, ...] = ()  #: in their order; none of their tokens is its own
    turns: tuple[EpisodeTurn, ...] = ()  #: of an episode; its ``text`` is that of the last one
    #: of a forked episode, the number of the first of its group with the same first turn
    trunk: int | None = None

    @property
    def trunk_length(self) -> int:
        """The number of tokens that were sampled once for all completions of its trunk."""
        return self.observations[0].start if self.observations else len(self.token_ids)

    @classmethod
    def from_text(
        cls, text: str, stop: StopReason = "eos", turns: Sequence[EpisodeTurn] = ()
    ) -> Completion:
        """Build a completion of which no tokens are known."""
        return cls((), (), text, stop, turns=tuple(turns))


@dataclass(frozen=True)
class Score:
    """The rewards and metrics of one completion."""

    answer: Any  #: the parsed answer; None if the text contains none
    #: value of each reward by name, before weighting; None if its method failed
    rewards: Mapping[str, float | None]
    #: weighted sum of the rewards; None if a reward with a weight is None (unscorable)
    total: float | None
    #: value of each metric by name; None if it failed or is undefined without an answer
    metrics: Mapping[str, float | None]
    #: traceback by the name of the reward or metric that failed, or by "parse"
    failures: Mapping[str, str] = field(default_factory=dict)

    def with_prefix(self, source: str) -> Score:
        """Return the score with the names of a mixture, ``SOURCE/NAME``; "" changes nothing."""
        if not source:
            return self
        rewards, metrics, failures = (
            {name if name == "parse" else f"{source}/{name}": v for name, v in values.items()}
            for values in (self.rewards, self.metrics, self.failures)
        )
        return replace(self, rewards=rewards, metrics=metrics, failures=failures)


@dataclass(frozen=True)
class Candidate:
    """A completion as a batch reward or batch metric sees it."""

    answer: Any  #: the parsed answer; None (only with ``needs_answer=False``): the text has none
    example: Example
    text: str
    tokens: int | None  #: number of its tokens; None: unknown, as in evaluation
    group: int  #: number of its group within the batch; completions of one prompt have the same
    turns: tuple[EpisodeTurn, ...] = ()  #: those of its episode; empty: it has no environment


@dataclass(frozen=True)
class Batch(Sequence[Candidate]):
    """The completions that a batch reward or batch metric scores together.

    The completions of a group follow each other. In training a batch holds the whole groups that
    a rank has sampled; in evaluation, groups have ``evaluation.samples`` completions.

    ``cache`` has the values that ``map`` got earlier in this run; None: they are not kept.
    """

    candidates: tuple[Candidate, ...]
    cache: ValueCache | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.candidates[index]

    def __len__(self) -> int:
        return len(self.candidates)

    def map(
        self,
        ask: Callable[[Any], float],
        build_request: Callable[[Candidate], Any],
        concurrency: int = 8,
        seconds: float = 60.0,
    ) -> list[float | BaseException]:
        """Ask a slow or remote service for the value of each completion, several at once.

        Values are kept in the run's folder by the content of their requests: equal requests are
        asked once, and a resumed run gets the values that it got before. Failures are not kept.

        Args:
            ask: returns the value for a request; called in threads. It must not use anything that
                is not in the request and can change the value.
            build_request: returns the request for a completion, a value that JSON can hold.
            concurrency: maximum number of calls at once.
            seconds: time limit of one call, after which it counts as failed. Its thread cannot be
                ended, so ``ask`` should have a shorter limit of its own.

        Returns:
            The value of each completion, or the exception that its call raised.
        """
        calls = share_calls(ask, self.cache)
        return call_all(lambda c: calls(build_request(c)), self, concurrency, seconds)


@dataclass(frozen=True)
class Group:
    """One prompt with its G completions and their scores."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]

    @property
    def id(self) -> str:
        return self.prompt.example.id
