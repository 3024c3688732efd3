"""sdist -> wheel -> installed into an empty environment -> run, beside Hugging Face's package named "kernels".

The new environment sees the dependencies of the one that runs this script (a path file, which does not activate its
editable install), so that torch is not fetched twice.
"""

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import pathlib, kernels, nvfp4_train as nt, nvfp4_kernels.reference, nvfp4_recipes, torch, transformers
assert "site-packages" in nt.__file__, nt.__file__
assert pathlib.Path(nt.__file__).is_relative_to(pathlib.Path({prefix!r}).resolve()), nt.__file__
assert not hasattr(kernels, "reference"), "Hugging Face's kernels is shadowed"
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
print(nt.convert(model, "nvidia_nvfp4"))
model(torch.randn(4, 32)).sum().backward()
assert all(torch.isfinite(p.grad).all() for p in model.parameters())
"""


def run(*command: str | Path, cwd: Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", work, ROOT, cwd=work)
        (sdist,) = work.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "source", filter="data")
        (source,) = (work / "source").iterdir()
        run(sys.executable, "-m", "build", "--wheel", "--outdir", work, source, cwd=work)
        (wheel,) = work.glob("*.whl")

        prefix = work / "elsewhere"
        venv.create(prefix, with_pip=True)
        python = prefix / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = prefix / "lib" / version / "site-packages"
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, "kernels", cwd=work)
        run(python, "-c", PROGRAM.format(prefix=str(prefix)), cwd=work)
        run(prefix / "bin" / "nvfp4-train", "recipes", cwd=work)
    print("packaging: 1 passed, 0 failed")


if __name__ == "__main__":
    main()
