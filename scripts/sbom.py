"""`python -m scripts.sbom WHEEL NAME==VERSION...`: a bill of materials beside the wheel, as CycloneDX JSON.

It names each binary in the wheel with its digest, what is compiled into them (NAME==VERSION...), and the
packages of constraints.txt that the wheel imports; those that only its extras import are optional.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from scripts.constraints import Pin, canonical, read

SCHEMA = SchemaVersion.V1_6
# What a compiler puts into our binaries, by licence.
LICENSES = {
    "pybind11": "BSD-3-Clause",
    "libstdc++": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "zig-compiler-rt": "MIT",
}


def bill(wheel: Path, compiled_in: dict[str, str], pins: Iterable[Pin]) -> str:
    """The document. compiled_in: name -> version, each with a licence in LICENSES."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        own = Parser().parsestr(archive.read(metadata).decode())
        files = [
            Component(name=name, type=ComponentType.FILE, bom_ref=name, hashes=[_sha256(archive.read(name))])
            for name in names
            if name.endswith(".so")
        ]
    linked = [
        Component(
            name=name,
            version=version,
            bom_ref=f"{name}@{version}",
            scope=ComponentScope.REQUIRED,
            licenses=[LicenseExpression(LICENSES[name])],
            purl=PackageURL("pypi" if name == "pybind11" else "generic", name=name, version=version),
        )
        for name, version in compiled_in.items()
    ]
    moonpool = Component(
        name=own["Name"],
        version=own["Version"],
        type=ComponentType.LIBRARY,
        bom_ref="moonpool",
        description=own["Summary"],
        licenses=[LicenseExpression(own["License-Expression"])],
        purl=PackageURL(
            "pypi", name=own["Name"], version=own["Version"], qualifiers={"file_name": wheel.name}
        ),
        hashes=[_sha256(wheel.read_bytes())],
        components=[*files, *linked],
    )
    document = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, wheel.name))
    document.metadata.component = moonpool
    pins = list(pins)
    required = _required(pins)
    components = {
        pin.name: Component(
            name=pin.name,
            version=pin.version,
            bom_ref=f"{pin.name}@{pin.version}",
            scope=ComponentScope.REQUIRED if pin.name in required else ComponentScope.OPTIONAL,
            purl=PackageURL("pypi", name=pin.name, version=pin.version),
        )
        for pin in pins
    }
    document.components.update(components.values())
    owner = {**components, "moonpool": moonpool}
    for name, component in owner.items():
        needed = [components[pin.name] for pin in pins if name in {_package(via) for via in pin.via}]
        document.register_dependency(component, [*needed, *(linked if name == "moonpool" else [])])
    text = make_outputter(document, OutputFormat.JSON, SCHEMA).output_as_string(indent=2)
    if wrong := JsonStrictValidator(SCHEMA).validate_str(text):
        raise ValueError(f"the bill of {wheel.name} is not CycloneDX {SCHEMA.to_version()}: {wrong}")
    return text + "\n"


def _required(pins: Iterable[Pin]) -> set[str]:
    """Names of the packages that are needed without an extra."""
    required, before = {"moonpool"}, 0
    while len(required) > before:
        before = len(required)
        required |= {pin.name for pin in pins if required & set(pin.via)}
    return required


def _package(via: str) -> str:
    return canonical(via.partition("[")[0])


def _sha256(data: bytes) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(data).hexdigest())


def main() -> None:
    wheel = Path(sys.argv[1])
    compiled_in = dict(word.split("==") for word in sys.argv[2:])
    wheel.with_name(f"{wheel.name}.cdx.json").write_text(bill(wheel, compiled_in, read()))


if __name__ == "__main__":
    main()
