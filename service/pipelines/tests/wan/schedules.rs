//! Schedules of UniPC against the reference's. (Its steps are tested where they are, with the reference's answers.)

use std::collections::BTreeMap;

use pipelines::unipc::{Grid, Schedule};
use serde::Deserialize;

use crate::numbers::json;

#[derive(Deserialize)]
struct Answer {
    sigmas: Vec<f64>,
    times: Vec<f32>,
}

#[test]
fn schedules_equal_the_reference() {
    let answers: BTreeMap<String, Answer> = json("wan-tiny/expected/unipc.json");
    for (name, answer) in answers {
        let parts: Vec<&str> = name.split('.').collect();
        let [steps, shift, _, grid] = parts[..] else {
            panic!("{name}");
        };
        let grid = match grid {
            "authors" => Grid::Authors,
            _ => Grid::Diffusers,
        };
        let (steps, shift) = (steps.parse().expect("steps"), shift.parse().expect("a shift"));
        let schedule = Schedule::new(grid, steps, shift);
        let sigmas: Vec<f64> = schedule.sigmas.iter().map(|sigma| f64::from(*sigma)).collect();
        assert_eq!(schedule.times, answer.times, "{name}");
        assert_eq!(sigmas.len(), answer.sigmas.len(), "{name}");
        for (found, expected) in sigmas.iter().zip(&answer.sigmas) {
            assert!((found - expected).abs() <= 6e-8, "{name}: {found}, {expected}");
        }
    }
}
