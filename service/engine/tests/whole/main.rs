//! The whole engine in one process: the real queue, the real card on the simulated one, the `instant` family, and
//! simulated time. Thousands of seeded schedules of faults are checked against named invariants, and for each
//! invariant there is a defect that it has to detect.
//!
//! `MOORED_WHOLE_SEED` and `MOORED_WHOLE_EPISODES` select the episodes. A failure prints its seed and its schedule;
//! `MOORED_WHOLE_SEED=<seed> MOORED_WHOLE_EPISODES=1` repeats it.

#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod clients;
mod defect;
mod models;
mod process;
mod slot;
#[path = "../watched/mod.rs"]
mod watched;
mod world;

use std::thread;

use defect::{Defect, Violation};
use models::Models;
use world::{Stats, episode};

const EPISODES: u64 = 4_000;

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(otherwise, |text| text.parse().unwrap())
}

/// Episodes `first..first + count`, until one fails.
fn episodes(models: &Models, first: u64, count: u64, defect: Defect) -> Result<Stats, Box<Violation>> {
    let mut all = Stats::default();
    for seed in first..first + count {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        all.add(runtime.block_on(episode(models, seed, defect))?);
    }
    Ok(all)
}

/// Panics of a model are part of the schedules, and are not printed.
fn quiet_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            let text = info.to_string();
            if !text.contains("asks for this panic") {
                eprintln!("{text}");
            }
        }));
    });
}

#[test]
fn jobs_end_once_and_no_memory_leaks_under_random_faults() {
    quiet_panics();
    let first = from_environment("MOORED_WHOLE_SEED", 1);
    let count = from_environment("MOORED_WHOLE_EPISODES", EPISODES);
    let models = Models::write();
    let threads = count.min(4);
    let share = count.div_ceil(threads);
    let played: Vec<_> = thread::scope(|scope| {
        let models = &models;
        let running: Vec<_> = (0..threads)
            .map(|n| scope.spawn(move || episodes(models, first + n * share, share, Defect::None)))
            .collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut stats = Stats::default();
    for outcome in played {
        match outcome {
            Ok(some) => stats.add(some),
            Err(violation) => panic!("{violation}"),
        }
    }
    println!("{stats:#?}");
    if count >= EPISODES {
        stats.assert_everything_happened();
    }
}

/// Each defect is detected, and by its own invariant.
#[test]
fn each_injected_defect_violates_its_invariant() {
    quiet_panics();
    let models = Models::write();
    thread::scope(|scope| {
        for half in [0, 1] {
            let models = &models;
            scope.spawn(move || {
                for (defect, invariant) in Defect::ALL.into_iter().skip(half).step_by(2) {
                    let found = episodes(models, 1, 300, defect);
                    let violation = found.err().unwrap_or_else(|| panic!("{defect:?} went unnoticed"));
                    println!("{defect:?}: {invariant:?} at seed {}", violation.seed);
                    assert_eq!(violation.invariant, invariant, "{defect:?}: {violation}");
                }
            });
        }
    });
}

/// The same seed gives the same history.
#[test]
fn equal_seeds_give_equal_episodes() {
    quiet_panics();
    let models = Models::write();
    for seed in 1..6 {
        let played = [(); 2].map(|()| episodes(&models, seed, 1, Defect::None).unwrap());
        assert_eq!(played[0], played[1], "seed {seed}");
    }
}
