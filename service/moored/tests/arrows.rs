//! The allowed dependencies and the prohibitions of docs/ARCHITECTURE.md, checked against manifests and sources.

#![allow(clippy::unwrap_used)] // a test

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CRATES: [&str; 20] = [
    "access",
    "journal",
    "residency",
    "gpu",
    "ops",
    "model",
    "pipelines",
    "engine",
    "media",
    "hub",
    "wording",
    "turns",
    "api",
    "config",
    "calls",
    "transport",
    "grpc",
    "web",
    "cli",
    "moored",
];

/// The crates that each crate may import.
fn allowed(name: &str) -> &'static [&'static str] {
    match name {
        "residency" | "api" | "wording" | "turns" => &[],
        "gpu" => &["residency"],
        "ops" => &["gpu"],
        "model" => &["ops", "gpu", "residency"],
        "pipelines" => &["model", "ops", "gpu", "residency"],
        "engine" => &["model", "ops", "gpu", "residency", "turns"],
        "media" => &["model"],
        "access" => &["gpu", "wording"],
        "journal" => &["gpu"],
        "config" => &["access", "model", "ops", "gpu", "residency", "wording"],
        "hub" => &["config", "model", "gpu", "residency", "wording", "turns"],
        "calls" => &[
            "access",
            "journal",
            "turns",
            "engine",
            "media",
            "hub",
            "config",
            "model",
            "gpu",
            "residency",
            "wording",
        ],
        "transport" => &["access", "calls", "config", "residency", "wording"],
        "web" => &[
            "access",
            "calls",
            "transport",
            "engine",
            "media",
            "model",
            "residency",
        ],
        "grpc" => &[
            "access",
            "api",
            "calls",
            "transport",
            "engine",
            "hub",
            "model",
            "gpu",
            "residency",
            "wording",
        ],
        "cli" => &[
            "access",
            "api",
            "media",
            "hub",
            "config",
            "model",
            "gpu",
            "residency",
            "wording",
        ],
        // It wires all of them together.
        "moored" => &[
            "access",
            "journal",
            "cli",
            "transport",
            "grpc",
            "web",
            "calls",
            "engine",
            "media",
            "hub",
            "config",
            "pipelines",
            "model",
            "gpu",
            "residency",
        ],
        other => {
            panic!(
                "{other} is a crate without allowed dependencies: add them here and in docs/ARCHITECTURE.md"
            )
        }
    }
}

fn service() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Direct dependencies of each crate, without those of its tests.
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

/// Rust sources of a crate, without tests.
fn sources(name: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![service().join(name).join("src")];
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
fn crates_import_only_allowed_crates() {
    let listed: BTreeSet<String> = CRATES.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(dependencies().into_keys().collect::<BTreeSet<_>>(), listed);
    for (name, dependencies) in dependencies() {
        let ours = dependencies.iter().filter(|d| CRATES.contains(&d.as_str()));
        for other in ours {
            assert!(
                allowed(&name).contains(&other.as_str()),
                "{name} must not import {other}"
            );
        }
    }
}

#[test]
fn only_the_server_and_the_command_line_know_the_public_protocol() {
    for (name, dependencies) in dependencies() {
        for protocol in [
            "api",
            "tonic",
            "prost",
            "prost-types",
            "tonic-prost",
            "tonic-types",
        ] {
            // A file of sentencepiece is a message of protocol buffers too.
            let is_of_files = (name.as_str(), protocol) == ("pipelines", "prost");
            assert!(
                ["api", "transport", "grpc", "cli"].contains(&name.as_str())
                    || is_of_files
                    || !dependencies.contains(protocol),
                "{name} imports {protocol}"
            );
        }
        let is_private = dependencies.contains("postcard");
        assert!(
            name == "moored" || !is_private,
            "{name} knows the protocol of workers"
        );
    }
}

#[test]
fn an_edit_of_a_family_rebuilds_the_program_alone() {
    let dependencies = dependencies();
    let importers = dependencies
        .iter()
        .filter(|(_, known)| known.contains("pipelines"));
    let importers: Vec<&str> = importers.map(|(name, _)| name.as_str()).collect();
    assert_eq!(importers, ["moored"]);
}

#[test]
fn residency_imports_no_runtime_io_or_clock() {
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

/// The queue's sources without their unit tests, by path within its folder.
fn queue_sources() -> Vec<(String, String)> {
    let folder = service().join("engine/src/queue");
    let of_queue = sources("engine").into_iter().filter_map(|(path, text)| {
        let name = path.strip_prefix(&folder).ok()?.to_str()?.to_owned();
        let code = text.split("#[cfg(test)]").next()?.to_owned();
        Some((name, code))
    });
    of_queue.collect()
}

#[test]
fn only_the_core_of_the_queue_sees_two_owners() {
    let outside = ["mod.rs", "shell.rs", "listener.rs", "encoding.rs"]; // they bring it calls
    let sources = queue_sources();
    assert!(sources.len() > 20);
    for (name, code) in sources {
        let is_core = name.starts_with("core/") || outside.contains(&name.as_str());
        assert!(
            is_core || !code.contains("core::"),
            "{name} uses the queue's core"
        );
        assert!(
            is_core || !code.contains("impl Core"),
            "{name} is no part of the queue's core"
        );
        for decisions in code
            .split("\nimpl")
            .filter(|code| code.trim_start_matches("<'a>").starts_with(" View<"))
        {
            let decisions = decisions.split("\n}\n").next().unwrap();
            assert!(
                !decisions.contains("&mut self"),
                "{name} decides over a view and changes something"
            );
        }
    }
}

/// The owners of the queue's state, each with its parts.
const OWNERS: [&[&str]; 9] = [
    &["CardRecord", "InFlight", "Pace"],
    &["JobRecord", "Swap", "Replay"],
    &["Claims"],
    &["Latents"],
    &["Learned"],
    &["Memos"],
    &["Shares"],
    &["Ended"],
    &["PendingUnload", "PendingTrim", "PendingRecycle"],
];

/// The blocks of `impl` of a file, each with the name of its type.
fn implementations(code: &str) -> impl Iterator<Item = (&str, &str)> {
    code.split("\nimpl").skip(1).filter_map(|block| {
        let (head, body) = block.split("\n}").next()?.split_once('{')?;
        let of_type = head.rsplit_once(" for ").map_or(head, |(_, of_type)| of_type);
        let name = of_type.trim_start_matches("<'a>").trim().split('<').next()?;
        Some((name, body))
    })
}

/// What a file does that only the core may: it changes two owners, or has one change by the look of another.
fn sight_of_two_owners(code: &str) -> Option<String> {
    let mut changed: Option<usize> = None;
    for (name, body) in implementations(code) {
        let changing = body
            .split("\n    }")
            .filter(|method| method.contains("&mut self"));
        let changing: Vec<&str> = changing.collect();
        let owner = OWNERS.iter().position(|parts| parts.contains(&name));
        let Some(owner) = owner.filter(|_| !changing.is_empty()) else {
            continue;
        };
        if changed.replace(owner).is_some_and(|other| other != owner) {
            return Some(format!("changes {name} and another owner"));
        }
        let others = OWNERS.iter().enumerate().filter(|(other, _)| *other != owner);
        for part in others.flat_map(|(_, parts)| *parts) {
            for shown in [format!("&{part}"), format!("&mut {part}"), format!("&[{part}]")] {
                let is_name = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
                if changing
                    .iter()
                    .any(|method| method.split(&shown).skip(1).any(is_name))
                {
                    return Some(format!("changes {name} by the look of {part}"));
                }
            }
        }
    }
    None
}

#[test]
fn no_file_of_the_queue_but_the_core_changes_two_owners() {
    for (name, code) in queue_sources() {
        if !name.starts_with("core/") {
            assert_eq!(sight_of_two_owners(&code), None, "{name}");
        }
    }
    let owners = OWNERS.iter().flat_map(|parts| *parts);
    let sources = queue_sources();
    for owner in owners {
        let is_defined = |(_, code): &(String, String)| {
            code.contains(&format!("struct {owner} ")) || code.contains(&format!("enum {owner} "))
        };
        assert!(sources.iter().any(is_defined), "there is no {owner} any more");
    }
}

#[test]
fn a_file_that_changes_two_owners_is_found() {
    let method =
        |of: &str, takes: &str| format!("\nimpl {of} {{\n    fn f(&mut self{takes}) {{\n    }}\n}}\n");
    for (code, is_found) in [
        (method("CardRecord", ""), false),
        (method("CardRecord", ", running: &InFlight"), false),
        (method("CardRecord", ", job: JobRecord"), false), // handed over: it is no owner of the core's any more
        (method("CardRecord", ", learned: &LearnedPace"), false),
        (method("CardRecord", ", learned: &Learned"), true),
        (method("Learned", ", jobs: &mut JobRecord"), true),
        (method("CardRecord", "") + &method("InFlight", ""), false),
        (method("CardRecord", "") + &method("Learned", ""), true),
        (method("Drop for CardRecord", "") + &method("Learned", ""), true),
    ] {
        assert_eq!(sight_of_two_owners(&code).is_some(), is_found, "{code}");
    }
}

#[test]
fn the_core_of_the_queue_does_no_io_and_reads_no_clock() {
    for (name, code) in queue_sources()
        .into_iter()
        .filter(|(name, _)| name.starts_with("core/"))
    {
        for outside in [
            "async ",
            ".await",
            "spawn",
            "Instant::now",
            "std::fs",
            "mpsc",
            "watch::",
        ] {
            assert!(!code.contains(outside), "{name}: {outside}");
        }
    }
}

#[test]
fn only_gpu_and_ops_have_unsafe_code() {
    for name in CRATES.iter().filter(|name| !["gpu", "ops"].contains(name)) {
        for (path, text) in sources(name) {
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let line = text.lines().filter(is_code).find(|line| line.contains("unsafe "));
            assert!(line.is_none(), "{}: {line:?}", path.display());
        }
    }
}

/// scripts/cuda-environment builds without candle's kernels for quantized tensors and mixtures of experts, which take most of the minutes
/// of a build: a call of them would end the process.
#[test]
fn nobody_calls_the_kernels_of_candle_that_are_not_built() {
    for name in CRATES {
        for (path, text) in sources(name) {
            for absent in ["candle_core::quantized", "QTensor", "QMatMul", "candle_nn::moe"] {
                assert!(!text.contains(absent), "{} has {absent}", path.display());
            }
        }
    }
}

#[test]
fn only_the_configuration_reads_the_environment() {
    for name in CRATES {
        for (path, text) in sources(name) {
            assert!(
                name == "config" || !text.contains("env::var"),
                "{} reads the environment",
                path.display()
            );
        }
    }
}

/// It refuses numbers that are none of an enum's, for all of them alike.
#[test]
fn every_message_of_a_client_comes_through_one_function() {
    for (path, text) in sources("grpc") {
        let (is_owner, is_session) = (path.ends_with("requests.rs"), path.ends_with("sessions.rs"));
        let taken = text.matches("request.into_inner()").count();
        // Of a session, each message is checked as it comes: a wrong segment fails alone.
        let most = match path.ends_with("generation.rs") {
            true => usize::from(text.contains("open_session(&self.0, request.into_inner(), caller)")),
            false => 0,
        };
        assert!(
            is_owner || taken == most,
            "{} takes messages itself",
            path.display()
        );
        assert!(!is_session || text.contains("known(&first)") && text.contains("known(&segment)"));
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

#[test]
fn the_workspace_has_one_program_which_cargo_runs_without_its_name() {
    let crates = std::fs::read_dir(service())
        .unwrap()
        .map(|each| each.unwrap().path());
    let has_program = |path: &std::path::PathBuf| {
        let manifest = std::fs::read_to_string(path.join("Cargo.toml")).unwrap_or_default();
        path.join("src/main.rs").exists() || path.join("src/bin").exists() || manifest.contains("[[bin]]")
    };
    let programs: Vec<_> = crates.filter(has_program).collect();
    assert_eq!(programs, [service().join("moored")]);
}
