//! A seeded simulation of cards, jobs, clients and other programs, turn by turn, with named invariants.
//!
//! `MOORED_SIM_SEED` and `MOORED_SIM_TURNS` choose where it starts and how long it lasts. A failure prints the seed of
//! its episode and the turn: `MOORED_SIM_SEED=<seed> MOORED_SIM_TURNS=1000` repeats exactly that episode.

#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod card;
mod checks;
mod defect;
mod holes;
mod jobs;
mod mover;
mod queue;
mod world;

use std::thread;

use defect::{Defect, Violation};
use world::{Stats, World};

const TURNS_AN_EPISODE: u64 = 1_000;

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(otherwise, |text| text.parse().unwrap())
}

/// Episodes `first..first + episodes`, until one fails.
fn episodes(first: u64, episodes: u64, defect: Defect) -> Result<Stats, Violation> {
    let mut all = Stats::default();
    for seed in first..first + episodes {
        all.add(&World::episode(seed, TURNS_AN_EPISODE, defect)?);
    }
    Ok(all)
}

#[test]
fn invariants_hold_for_a_million_turns() {
    let first = from_environment("MOORED_SIM_SEED", 1);
    let turns = from_environment("MOORED_SIM_TURNS", 1_000_000);
    let each = turns.div_ceil(TURNS_AN_EPISODE);
    let threads = 4.min(each);
    let share = each.div_ceil(threads);
    let running: Vec<_> = (0..threads)
        .map(|n| thread::spawn(move || episodes(first + n * share, share, Defect::None)))
        .collect();
    let mut stats = Stats::default();
    for thread in running {
        match thread.join().unwrap() {
            Ok(some) => stats.add(&some),
            Err(Violation {
                invariant,
                seed,
                turn,
                what,
            }) => panic!("{invariant:?} at seed {seed}, turn {turn}: {what}"),
        }
    }
    println!("{stats:?}");
    assert!(stats.turns >= turns);
    if turns >= 1_000_000 {
        stats.assert_everything_happened();
    }
}

/// Each defect is noticed, and by the invariant that is meant to notice it.
#[test]
fn each_injected_defect_violates_its_invariant() {
    for (defect, invariant) in Defect::ALL {
        let seen = episodes(1, 200, defect);
        let violation = seen.err().unwrap_or_else(|| panic!("{defect:?} went unnoticed"));
        println!(
            "{defect:?}: {invariant:?} at seed {}, turn {}",
            violation.seed, violation.turn
        );
        assert_eq!(violation.invariant, invariant, "{defect:?}: {}", violation.what);
    }
}

/// The same seed is the same history.
#[test]
fn equal_seeds_give_equal_episodes() {
    let stats = [(); 2].map(|()| World::episode(7, TURNS_AN_EPISODE, Defect::None).unwrap());
    assert_eq!(stats[0], stats[1]);
}
