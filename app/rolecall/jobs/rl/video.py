"""A video of an episode: the pictures of its environment, written by imageio's ffmpeg as they come."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.messages import Array
from rolecall.jobs.rl.stepping import Envs

RATE = 30  # pictures a second, where the environment says nothing
# a palette for each picture: one for all would have to wait for the last
PALETTES = "split[one][two];[one]palettegen=stats_mode=single[palette];[two][palette]paletteuse=new=1"
CODECS: dict[str, dict[str, Any]] = {
    ".mp4": {"codec": "libx264"},
    ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": ["-filter_complex", PALETTES]},
}


class FilmedEnv(Envs):
    """One environment, each of whose pictures goes to `video`. Raises UsageError where it shows none."""

    def __init__(self, settings: RlSettings, seed: int, video: Video) -> None:
        self._video = video
        with warnings.catch_warnings():  # of what the error says
            warnings.simplefilter("ignore")
            try:
                super().__init__(settings, 1, seed, render=True)
                first = self.picture()
            except UsageError as error:
                raise UsageError(f"--video: {error}") from error
        video.begin(first, float(self._envs.metadata.get("render_fps") or RATE))

    def step(self, actions: Array) -> None:
        """Takes `actions` [1, *A]. Raises BrokenEnvError, and UsageError where the video cannot be written."""
        super().step(actions)
        self._video.add(self.picture())


class Video:
    """The file `path`, .mp4 or .gif, of what `begin` and `add` are given; a context, at whose end it is complete. Where
    that raises, there is none.

    Raises UsageError for another name, where imageio is missing, and where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix.lower() not in CODECS:
            raise UsageError(f"--video: {path} is no video; give a name that ends in {' or '.join(CODECS)}")
        if not path.parent.is_dir():
            raise UsageError(f"--video: {path.parent} is no folder; make it first")
        try:
            self._library = importlib.import_module("imageio_ffmpeg")
        except ImportError as error:
            raise UsageError(f"--video: needs imageio ({error}): pip install 'rolecall[video]'") from None
        self._partial = path.with_name(f".{path.stem}-partial{path.suffix}")
        self._writer: Generator[None, Any, None] | None = None

    def begin(self, picture: Array, rate: float) -> None:
        """The first picture [height, width, 3] uint8, of `rate` a second."""
        height, width = (side + side % 2 for side in picture.shape[:2])
        with self._writing():
            self._writer = self._library.write_frames(
                str(self._partial), (width, height), fps=rate, macro_block_size=1, ffmpeg_log_level="error",
                **CODECS[self.path.suffix.lower()],
            )  # fmt: skip
            next(self._writer)
        self.add(picture)

    def add(self, picture: Array) -> None:
        """The next picture, of the same size. MP4 takes even sizes only: the last row or column is repeated."""
        assert self._writer is not None
        edges = [(0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)]
        with self._writing():
            self._writer.send(np.ascontiguousarray(np.pad(picture, edges, "edge")))

    def __enter__(self) -> Video:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writing():
            if self._writer is not None:
                self._writer.close()
            if kind is None:
                self._partial.replace(self.path)
            else:
                self._partial.unlink(missing_ok=True)

    def _writing(self) -> Any:
        return UsageError.wrap(f"--video: {self.path} cannot be written")
