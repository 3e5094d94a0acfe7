"""SwanLab: cloud, a local dashboard, or offline files to be synchronised later."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import swanlab

from rlhf.track.sinks.sink import SampleRow
from rlhf.track.sinks.tensorboard import markdown_table

logger = logging.getLogger(__name__)
Mode = Literal["cloud", "local", "offline"]


class SwanLabSink:
    """One SwanLab run. In cloud mode without a login the data is kept offline instead."""

    def __init__(self, folder: Path, project: str, mode: Mode, config: Mapping[str, Any]) -> None:
        if mode == "local" and importlib.util.find_spec("swanboard") is None:
            raise RuntimeError("local mode needs the dashboard: pip install 'swanlab[dashboard]'")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._init(folder, project, "online" if mode == "cloud" else mode, config)
        except Exception as error:
            if mode != "cloud":
                raise
            logger.warning(
                "SwanLab's cloud cannot be used (%s); data goes to %s, `swanlab sync` sends it",
                error,
                folder,
            )
            self._run = self._init(folder, project, "offline", config)

    @staticmethod
    def _init(
        folder: Path,
        project: str,
        mode: Literal["online", "local", "offline"],
        config: Mapping[str, Any],
    ) -> Any:
        # it would wrap stdout and stderr, and ask for a key on the terminal
        settings = swanlab.Settings.model_validate(
            {"interactive": False, "terminal": {"proxy_type": "none"}}
        )
        return swanlab.init(
            project=project,
            name=folder.parent.name,
            mode=mode,
            log_dir=str(folder),
            config=dict(config),
            settings=settings,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        self.step(steps_done, metrics)

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        self._run.log({"samples": swanlab.Text(f"{title}\n\n{markdown_table(rows)}")})

    def close(self) -> None:
        self._run.finish()
