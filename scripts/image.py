"""Builds both images of `deployments/image/Dockerfile` without a registry and without a daemon, and tries them.

python -m scripts.image [--out build/image] [--apt-sources FILE]      # what `make image` does

The base image comes from Debian's packages (mmdebstrap). Python's packages come from where pip's settings lead, and
only those whose hashes are in `packaging/locked/`. buildah follows the Dockerfile, and runc runs what it has built: as
the images' user, without rights, without a network, and with a root that cannot be written. This takes root, on Linux
and x86-64.

For each image the folder `--out` gets an OCI archive, its digest, and a CycloneDX list of what is inside.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.markers import Marker

from tuneship.dossier.components import components, named_licenses

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "deployments" / "image" / "Dockerfile"
PROGRAMS = ("buildah", "mmdebstrap", "runc")
# By the name of the image: the target of the Dockerfile.
IMAGES = {"tuneship": "service", "tuneship-node": "node"}
LOCKS = ("build", "service", "torch-cpu", "node")
# The Python of the Dockerfile: its first and last correction, since a package may be needed by some of them only.
PYTHONS = ("3.11.0", "3.11.99")
# Debian 12 has version 2.36 of the C library, which runs what was built for older ones.
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)))
# Where apt's settings may name the mirrors for the suite of the Dockerfile.
APT_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
PASSES_WITHIN_S = 1200

# Runs in the container of the service: a project of a user's own. It has less data than the example, so that two cores
# train it in a minute or two, and no limits on latency, since the machine has other work.
RELEASE = """
import json, os, subprocess, sys, yaml
from pathlib import Path
from tuneship.settings import ClientSettings
key = ClientSettings.from_credentials(Path(os.environ["TUNESHIP_DATA_DIR"]) / "credentials.json")
place = {
    "TUNESHIP_URL": "http://127.0.0.1:8700",
    "TUNESHIP_API_KEY": key.api_key.get_secret_value(),
    "TUNESHIP_CLIENT_ID": key.client_id,
}
subprocess.run(["tuneship", "init", "shop"], check=True)
plan = Path("shop/examples/release.yaml")
chosen = yaml.safe_load(plan.read_text())
chosen["canary"] |= {"latency_gates": None, "steps": [50, 100], "bake_looks": 3}
chosen["evaluation"]["max_examples"] = 20
for name in chosen["data"]["files"]:
    file = plan.parent / name
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:400]))
plan.write_text(yaml.safe_dump(chosen))
command = [sys.executable, "flows/tune_and_deploy.py", "--params", "examples/release.yaml", "--result", "out.json"]
done = subprocess.run(command, cwd="shop", env=os.environ | place)
sys.exit(done.returncode)
"""


def missing() -> list[str]:
    """What this machine lacks to build and run images, by name."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return lacking + ([] if os.geteuid() == 0 else ["root"])


def run(*command: str | Path, stdout: int | None = subprocess.PIPE, **options: Any) -> str:
    """Run a program that must succeed, and return what it wrote to its output. Raises `CalledProcessError`."""
    done = subprocess.run(command, check=True, text=True, stdout=stdout, **options)
    return (done.stdout or "").strip()


def say(text: str) -> None:
    """Print one line at once."""
    print(text, flush=True)


class Storage:
    """A store of images of its own, which is removed at the end; the machine's own store is not touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._options = ("--root", str(folder / "images"), "--runroot", str(folder / "running"))

    def buildah(self, command: str, *arguments: str | Path, **options: Any) -> str:
        """Run a command of buildah on this store."""
        return run("buildah", *self._options, command, *arguments, **options)

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """A container of an image, whose files are at the path that it yields."""
        container = self.buildah("from", "--pull-never", image)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)


def debian(storage: Storage, own_sources: Path | None) -> str:
    """Make a minimal Debian of the Dockerfile's suite from packages; returns the name of the image.

    `own_sources`: a file as apt reads it, instead of the machine's own.
    """
    (suite,) = re.findall(r"^ARG DEBIAN_IMAGE=debian:(\w+)-slim$", RECIPE.read_text(), re.MULTILINE)
    machines = [one for one in APT_SOURCES if names_suite(one, suite)]
    sources = [own_sources] if own_sources else machines[:1]
    say(f"Debian {suite}, by {sources[0] if sources else 'the mirrors that mmdebstrap knows'}")
    archive = storage.folder / "debian.tar"
    # As Debian's own installer does it. Otherwise a package does it, which brings the whole of Perl.
    merged = "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr"
    options = ("--quiet", "--mode=root", "--variant=minbase", merged)
    run("mmdebstrap", *options, suite, archive, *sources)
    name = f"localhost/debian:{suite}"
    container = storage.buildah("from", "scratch")
    storage.buildah("add", "--quiet", container, archive, "/")
    storage.buildah("commit", "--quiet", "--rm", container, name)
    return name


def names_suite(file: Path, suite: str) -> bool:
    """Whether a file of apt's sources is there and has the suite."""
    return file.is_file() and re.search(rf"\b{suite}\b", file.read_text()) is not None


def download(folder: Path) -> None:
    """Let this environment's pip download what the images install, checked by its hashes."""
    texts = ((ROOT / "packaging" / "locked" / f"{name}.txt").read_text() for name in LOCKS)
    wanted = "".join(for_the_images(text) for text in texts)
    say(f"wheels: {len(re.findall('^[a-z0-9]', wanted, re.MULTILINE))} packages, by pip's settings")
    options = ["-qq", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    options += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"]
    options += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    options += [f"--platform={platform}" for platform in PLATFORMS]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(wanted)
        file.flush()
        run(*(sys.executable, "-m", "pip", "download", *options, "--dest", folder, "-r", file.name))


def for_the_images(lock: str) -> str:
    """The entries of a lock that Linux on x86-64 and the images' Python install.

    pip would ask the Python that it runs in, also when it downloads for another.
    """

    def kept(entry: re.Match[str]) -> str:
        name, _, marker = entry[1].partition(";")
        target = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}
        taken = not marker or any(
            Marker(marker.strip()).evaluate(target | {"python_full_version": full})
            for full in PYTHONS
        )
        return f"{name.strip()} \\\n{entry[2]}" if taken else ""

    return re.sub(r"^([a-z0-9].*?) *\\\n((?: +.*\n)+)", kept, lock, flags=re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """An image that was built, and its files beside each other."""

    name: str
    version: str
    archive: Path
    # Of its manifest: what a registry names it by.
    digest: str


def build(storage: Storage, base: str, out: Path, epoch: str) -> list[Built]:
    """Follow the Dockerfile for both targets, and write their archives and digests."""
    version = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )[0]
    labels = {"version": version, "revision": revision()}
    arguments = {
        "DEBIAN_IMAGE": base,
        "TORCH": "torch-cpu",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_NO_INDEX": "1",
        "SOURCE_DATE_EPOCH": epoch,
    }
    options = ["--isolation", "chroot", "--format", "oci", "--layers", "--pull-never"]
    options += ["--timestamp", epoch, "--volume", f"{out / 'wheels'}:/wheels:ro"]
    options += ["--file", str(RECIPE), "--ignorefile", f"{RECIPE}.dockerignore"]
    for name, value in labels.items():
        options += ["--label", f"org.opencontainers.image.{name}={value}"]
    for name, value in arguments.items():
        options += ["--build-arg", f"{name}={value}"]
    made = list[Built]()
    for name, target in IMAGES.items():
        say(f"image {name}: target {target}")
        wanted = ("--target", target, "--tag", f"localhost/{name}")
        storage.buildah("build", *options, *wanted, ROOT, stdout=None)
        archive = out / f"{name}-{version}.oci.tar"
        archive.unlink(missing_ok=True)
        digest = archive.with_suffix(".digest")
        place = f"oci-archive:{archive}:{name}:{version}"
        storage.buildah("push", "--quiet", "--digestfile", digest, f"localhost/{name}", place)
        made.append(Built(name, version, archive, digest.read_text().strip()))
    return made


def revision() -> str:
    """The commit that the images are made of, with a mark where files differ from it."""
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT)
    return commit + ("-changed" if run("git", "status", "--porcelain", cwd=ROOT) else "")


def contents(built: Built, root: Path) -> dict[str, Any]:
    """The CycloneDX list of an image: Debian's packages and Python's."""
    paths = [str(one) for one in (root / "opt" / "tuneship" / "lib").glob("python3*/site-packages")]
    listed = components(metadata.distributions(path=paths), debian_components(root))
    image = {
        "type": "container",
        "name": built.name,
        "version": built.version,
        "hashes": [{"alg": "SHA-256", "content": built.digest.removeprefix("sha256:")}],
    }
    own = listed["metadata"]["component"]
    return listed | {
        "metadata": {"component": image},
        "components": [own, *listed["components"]],
    }


def debian_components(root: Path) -> Iterator[dict[str, Any]]:
    """The packages in dpkg's own list below `root`, as components, with the licences that Debian names."""
    status = root / "var" / "lib" / "dpkg" / "status"
    for entry in status.read_text().split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.+)$", entry, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={fields['Architecture']}"
            made = {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "purl": purl,
            }
            file = root / "usr" / "share" / "doc" / name / "copyright"
            text = file.read_text(errors="replace") if file.is_file() else ""
            # Other files than those in Debian's format are prose, whose words are nobody's names of licences.
            is_listed = text.startswith("Format:")
            names = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE) if is_listed else ()
            yield made | named_licenses(names)


@contextmanager
def container(
    root: Path, image: dict[str, Any], data: Path, *command: str, **environment: str
) -> Iterator["Container"]:
    """Run an image as its own description says, with `command` instead of its own if there is one."""
    config = image["OCIv1"]["config"]
    with tempfile.TemporaryDirectory() as bundle:
        run("runc", "spec", "--bundle", bundle)
        file = Path(bundle) / "config.json"
        spec = json.loads(file.read_text())
        uid = int(config["User"])
        data.mkdir()
        os.chown(data, uid, uid)
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": uid, "gid": uid},
            "args": [*config["Entrypoint"], *(command or config["Cmd"])],
            "env": [*config["Env"], *(f"{name}={value}" for name, value in environment.items())],
            "cwd": config["WorkingDir"],
            "capabilities": {},
            "rlimits": [],
        }
        spec["root"] = {"path": str(root), "readonly": True}
        temporary = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}  # noqa: S108 - in the container
        kept = {"destination": config["WorkingDir"], "type": "none", "source": str(data)}
        spec["mounts"] += [
            temporary | {"options": ["nosuid", "nodev", "mode=1777"]},
            kept | {"options": ["bind", "rw"]},
        ]
        file.write_text(json.dumps(spec))
        name = f"tuneship-{os.getpid()}"
        with (data.parent / f"{data.name}.log").open("w") as log:
            running = subprocess.Popen(
                ["runc", "run", "--bundle", bundle, name], stdout=log, stderr=subprocess.STDOUT
            )
            try:
                yield Container(name, running)
            finally:
                if running.poll() is None:
                    subprocess.run(["runc", "kill", name, "KILL"], check=False)
                    running.wait()


@dataclass(frozen=True)
class Container:
    """A running container."""

    name: str
    running: subprocess.Popen[bytes]

    def command(self, *command: str) -> list[str]:
        """The command that runs another program in it."""
        return ["runc", "exec", self.name, *command]

    def until(self, *command: str) -> None:
        """Repeat a command in it until it succeeds. Raises `RuntimeError`."""
        until = time.monotonic() + PASSES_WITHIN_S
        while subprocess.run(self.command(*command), check=False, capture_output=True).returncode:
            if self.running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not succeed: exit {self.running.poll()}")
            time.sleep(0.5)

    def end(self) -> int:
        """Ask its first process to end; returns its exit status."""
        run("runc", "kill", self.name, "TERM")
        return self.running.wait(120)


def health_check() -> list[str]:
    """The command of the Dockerfile's HEALTHCHECK."""
    (command,) = re.findall(
        r"^HEALTHCHECK .*?CMD (\[.*?\])$",
        RECIPE.read_text().replace("\\\n", ""),
        re.MULTILINE | re.DOTALL,
    )
    return json.loads(command)


def try_service(root: Path, image: dict[str, Any], folder: Path) -> None:
    """Start the service, run a release at it, and end it. Raises `CalledProcessError`, `RuntimeError`."""
    started = time.monotonic()
    with container(root, image, folder / "service") as service:
        service.until(*health_check())
        say(f"the service answers after {time.monotonic() - started:.1f} s")
        run(*service.command("python", "-c", RELEASE), stdout=None)
        result = json.loads((folder / "service" / "shop" / "out.json").read_text())
        if result["outcome"] != "promoted":
            raise RuntimeError(f"the release ended as {result['outcome']}")
        say(f"a release in it: promoted, {time.monotonic() - started:.0f} s after the start")
        if code := service.end():
            raise RuntimeError(f"the service ended with {code}")


def try_node(root: Path, image: dict[str, Any], folder: Path) -> None:
    """Start a Ray cluster of one node, run a task and the program of an agent on it. Raises as `try_service`."""
    command = ["ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=1"]
    token = os.urandom(16).hex()
    with container(root, image, folder / "node", *command, RAY_AUTH_TOKEN=token) as node:
        node.until(
            "python", "-c", "import ray; ray.init('auto'); ray.get(ray.remote(lambda: 1).remote())"
        )
        run(*node.command("python", "-m", "tuneship.agents.agent", "--help"))
        say("a node of Ray runs a task, and the program of an agent")
        node.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, list and try both images; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.image")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "image")
    parser.add_argument("--apt-sources", type=Path)
    chosen = parser.parse_args(arguments)
    out: Path = chosen.out.resolve()
    if lacking := missing():
        print(f"make image needs {', '.join(lacking)}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    # One time for all files: with the same packages, the same commit gives the same digests.
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT)
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=out))
    storage = Storage(folder)
    try:
        download(out / "wheels")
        made = build(storage, debian(storage, chosen.apt_sources), out, epoch)
        lines = list[str]()
        for built in made:
            with storage.mounted(f"localhost/{built.name}") as root:
                listed = contents(built, root)
                written = json.dumps(listed, indent=1)
                built.archive.with_suffix(".cdx.json").write_text(written + "\n")
                image = json.loads(
                    storage.buildah("inspect", "--type", "image", f"localhost/{built.name}")
                )
                (try_node if built.name.endswith("node") else try_service)(root, image, folder)
                unpacked = int(run("du", "--summarize", "--block-size=1M", root).split()[0])
            packed = built.archive.stat().st_size / 1e6
            lines.append(
                f"{built.archive.name}: {packed:.0f} MB, {unpacked} MiB unpacked,"
                f" {len(listed['components'])} components, {built.digest}"
            )
    except subprocess.CalledProcessError as error:
        # Its own words stand above, and so does the step.
        print(
            f"make image: {Path(error.cmd[0]).name} ended with {error.returncode}", file=sys.stderr
        )
        return 1
    except RuntimeError as error:
        print(f"make image: {error}", file=sys.stderr)
        return 1
    finally:
        for command in (("rm", "--all"), ("rmi", "--all", "--force")):
            # A buildah that cannot work here leaves nothing, either.
            with suppress(subprocess.CalledProcessError):
                storage.buildah(*command)
        shutil.rmtree(folder)
    say("\n".join([f"in {out}:", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
