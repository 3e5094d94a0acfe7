"""What tests ask of the private Slurm: submit, wait for a state, break a node."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.runs import ROOT, clean_environment, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
SLURM_LOCAL = Path(__file__).parent / "slurm-local"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
JOB_LIMIT_S = 240


@dataclass(frozen=True)
class Cluster:
    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return {
            **clean_environment(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "SLURM_LOCAL_DIR": str(self.folder),
            "SLURM_LOCAL_PORT": str(self.port),
        }

    def control(self, *arguments: str) -> str:
        """``slurm-local ARGUMENTS``."""
        return self.run(str(SLURM_LOCAL), *arguments)

    def run(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, config: Path, nodes: int, *settings: str, **variables: str) -> Job:
        """``sbatch launch/grpo_600b.sh`` of a configuration, one rank per node unless told."""
        folder = config.parent
        log = folder / "job.log"
        shown = {"CONFIG": str(config), "RANKS_PER_NODE": "1", "LOGS": str(folder / "logs")}
        out = self.run(
            *("sbatch", "--parsable", f"--nodes={nodes}", f"--output={log}", "--time=10"),
            "--signal=B:USR1@60",
            *("launch/grpo_600b.sh", *settings),
            **{
                **shown,
                "MAX_RESTARTS": "0",
                "PREFLIGHT": "0",
                "PYTHON": os.sys.executable,
                **variables,
            },
        )
        return Job(self, int(out), log)

    def hosts(self, nodelist: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", nodelist).split()


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    number: int
    log: Path

    def facts(self) -> dict[str, str]:
        text = self.cluster.run("scontrol", "show", "job", str(self.number), "-o")
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, *states: str, limit_s: float = JOB_LIMIT_S) -> dict[str, str]:
        """The facts of the job once it is in one of these states (none: once it has ended)."""

        def reached() -> dict[str, str] | None:
            facts = self.facts()
            if facts["JobState"] in (states or ENDED):
                return facts
            assert facts["JobState"] not in ENDED, f"{facts['JobState']}: {self.output()}"
            return None

        return wait_for(reached, limit_s, f"job {self.number} in {states or ENDED}")

    def ends_well(self, limit_s: float = JOB_LIMIT_S) -> dict[str, str]:
        facts = self.wait(limit_s=limit_s)
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), self.output()
        return facts

    def output(self) -> str:
        """What the job and its ranks have printed."""
        files = [self.log, *sorted(self.log.parent.glob("logs/*/*/rank*.log"))]
        return "\n".join(f"== {f}\n{f.read_text(encoding='utf-8')}" for f in files if f.exists())

    def signal(self, name: str) -> None:
        """As Slurm does near the time limit: to the batch script alone."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", str(self.number))
