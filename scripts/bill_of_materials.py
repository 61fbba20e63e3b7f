"""Writes what the program is linked from as a CycloneDX document: names, versions, licences, checksums.

    python scripts/bill_of_materials.py moored.cdx.json --features cuda --version 0.1.0

The crates are those of `third_party_licences.py`. The document has no random identity, and the time of the
commit (SOURCE_DATE_EPOCH), so that the same sources give the same file.
"""

from __future__ import annotations

import argparse
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomllib
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from third_party_licences import ROOT, linked_crates

LICENCES = LicenseFactory()


def checksums() -> dict[tuple[str, str], str]:
    """SHA-256 of each crate's archive, by name and version, as Cargo.lock pins it."""
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))
    return {
        (one["name"], one["version"]): one["checksum"]
        for one in lock["package"]
        if "checksum" in one
    }


def component(crate: dict[str, Any], sha256: str | None) -> Component:
    """A crate as a part of the program."""
    name, version = crate["name"], crate["version"]
    page = crate["repository"]
    # The older way to write OR, which is no SPDX.
    licence = (crate["license"] or "").replace("/", " OR ")
    purl = PackageURL("cargo", name=name, version=version)
    return Component(
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        name=name,
        version=version,
        purl=purl,
        licenses=[LICENCES.make_from_string(licence)] if licence else [],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(page))]
        if page
        else [],
    )


def bill(features: str, version: str, commit_time: int) -> str:
    """The document as JSON."""
    program = Component(
        type=ComponentType.APPLICATION,
        bom_ref="moored",
        name="moored",
        version=version,
        licenses=[LICENCES.make_from_string("Apache-2.0")],
    )
    known = checksums()
    parts = [
        component(crate, known.get((crate["name"], crate["version"])))
        for crate in linked_crates(features)
    ]
    # Of the sources and the features, so that it is the same for the same program.
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"moored {version} {features} {commit_time}")
    document = Bom(components=parts, serial_number=identity)
    document.metadata.component = program
    document.metadata.timestamp = datetime.fromtimestamp(commit_time, UTC)
    document.register_dependency(program, parts)
    return JsonV1Dot6(document).output_as_string(indent=2)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--features", default="", help="features of the program")
    parser.add_argument("--version", required=True, help="version of the program")
    parser.add_argument("--check", action="store_true", help="hold it to the schema too, for 10 s")
    arguments = parser.parse_args()
    commit_time = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    text = bill(arguments.features, arguments.version, commit_time)
    problem = (
        JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) if arguments.check else None
    )
    if problem is not None:
        raise SystemExit(f"the list is no valid CycloneDX: {problem}")
    arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
