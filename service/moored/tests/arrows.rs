//! The house's arrows and "nevers" (docs/ARCHITECTURE.md), read off the manifests and the sources.

#![allow(clippy::unwrap_used)] // a test

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const ROOMS: [&str; 6] = ["residency", "gpu", "ops", "pipelines", "engine", "moored"];

/// Which rooms each room may import.
fn allowed(room: &str) -> &'static [&'static str] {
    match room {
        "residency" => &[],
        "gpu" => &["residency"],
        "ops" => &["gpu"],
        "pipelines" => &["ops", "gpu", "residency"],
        "engine" => &["pipelines", "gpu", "residency"],
        "moored" => &["engine", "pipelines", "gpu", "residency"],
        other => {
            panic!("{other} is a room that has no arrows yet: draw them here and in docs/ARCHITECTURE.md")
        }
    }
}

fn service() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Direct dependencies of each room, those of its tests left out.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(service()).unwrap() {
        let manifest = entry.unwrap().path().join("Cargo.toml");
        let text = std::fs::read_to_string(&manifest).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        let name = manifest["package"]["name"].as_str().unwrap().to_owned();
        let table = manifest
            .get("dependencies")
            .and_then(|d| d.as_table())
            .cloned()
            .unwrap_or_default();
        found.insert(name, table.keys().cloned().collect());
    }
    found
}

/// Rust sources of a room, tests left out.
fn sources(room: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![service().join(room).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

#[test]
fn arrows_point_one_way() {
    for (room, dependencies) in dependencies() {
        let ours = dependencies.iter().filter(|d| ROOMS.contains(&d.as_str()));
        for other in ours {
            assert!(
                allowed(&room).contains(&other.as_str()),
                "{room} must not import {other}"
            );
        }
    }
}

#[test]
fn only_the_binary_knows_a_protocol() {
    for (room, dependencies) in dependencies() {
        for protocol in ["tonic", "prost", "tonic-prost", "tonic-types", "postcard"] {
            assert!(
                room == "moored" || !dependencies.contains(protocol),
                "{room} imports {protocol}"
            );
        }
    }
}

#[test]
fn residency_is_pure() {
    for heavy in ["tokio", "candle-core", "tracing", "cudarc", "sysinfo"] {
        assert!(
            !dependencies()["residency"].contains(heavy),
            "residency imports {heavy}"
        );
    }
    for (path, text) in sources("residency") {
        for impure in [
            "std::fs",
            "std::time::Instant",
            "SystemTime",
            "std::thread",
            "std::env",
        ] {
            assert!(!text.contains(impure), "{} uses {impure}", path.display());
        }
    }
}

#[test]
fn unsafe_lives_in_gpu_and_ops_alone() {
    for room in ROOMS.iter().filter(|room| !["gpu", "ops"].contains(room)) {
        for (path, text) in sources(room) {
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let line = text.lines().filter(is_code).find(|line| line.contains("unsafe "));
            assert!(line.is_none(), "{}: {line:?}", path.display());
        }
    }
}

#[test]
fn only_the_configuration_reads_the_environment() {
    for room in ROOMS {
        for (path, text) in sources(room) {
            let is_config = path.components().any(|part| part.as_os_str() == "config");
            assert!(
                is_config || !text.contains("env::var"),
                "{} reads the environment",
                path.display()
            );
        }
    }
}

#[test]
fn families_do_not_know_clients_or_residency_moves() {
    for (path, text) in sources("pipelines") {
        for foreign in ["residency::plan", "Ledger", "client_id"] {
            assert!(!text.contains(foreign), "{} knows {foreign}", path.display());
        }
    }
}
