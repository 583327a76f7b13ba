"""A video of an episode: the pictures of its environment, written one by one with imageio's ffmpeg."""

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
from rolecall.jobs.support import require_packages

DEFAULT_FPS = 30  # if the environment has none
# each picture has its own palette, because a common one would have to wait for the last picture
PALETTES = "split[one][two];[one]palettegen=stats_mode=single[palette];[two][palette]paletteuse=new=1"
CODECS: dict[str, dict[str, Any]] = {
    ".mp4": {"codec": "libx264"},
    ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "output_params": ["-filter_complex", PALETTES]},
}


class FilmedEnv(Envs):
    """One environment whose pictures are added to `video`. Raises UsageError if it has none."""

    def __init__(self, settings: RlSettings, seed: int, video: Video) -> None:
        self._video = video
        with warnings.catch_warnings():  # the error has their text
            warnings.simplefilter("ignore")
            try:
                super().__init__(settings, 1, seed, render=True)
                first = self.picture()
            except UsageError as error:
                raise UsageError(f"--video: {error}") from error
        video.begin(first, float(self._envs.metadata.get("render_fps") or DEFAULT_FPS))

    def step(self, actions: Array) -> None:
        """Steps with `actions` [1, *A]. Raises BrokenEnvError, and UsageError if the video cannot be written."""
        super().step(actions)
        self._video.add(self.picture())


class Video:
    """Writes pictures to the file `path`, .mp4 or .gif, which exists once the `with` block has ended without an error.

    Raises UsageError for another suffix, if imageio-ffmpeg is missing, and if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix.lower() not in CODECS:
            raise UsageError(f"--video: {path} is no video; the name must end in {' or '.join(CODECS)}")
        if not path.parent.is_dir():
            raise UsageError(f"--video: {path.parent} is no folder; create it")
        require_packages("--video", ["imageio_ffmpeg"], "video")
        self._library: Any = importlib.import_module("imageio_ffmpeg")
        self._partial = path.with_name(f".{path.stem}-partial{path.suffix}")
        self._writer: Generator[None, Any, None] | None = None

    def begin(self, picture: Array, rate: float) -> None:
        """Starts the video with a picture [height, width, 3] uint8, at `rate` pictures a second."""
        height, width = (side + side % 2 for side in picture.shape[:2])
        with self._writing():
            self._writer = self._library.write_frames(
                str(self._partial),
                (width, height),
                fps=rate,
                macro_block_size=1,
                ffmpeg_log_level="error",
                **CODECS[self.path.suffix.lower()],
            )
            next(self._writer)
        self.add(picture)

    def add(self, picture: Array) -> None:
        """Adds a picture of the same size. MP4 needs even sizes, so the last row or column may be repeated."""
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
