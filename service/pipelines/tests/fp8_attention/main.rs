//! Attention in fp8, over all families: those that read the field compute the planned shapes in e4m3, near what they compute in full,
//! and the others refuse it.

#![allow(clippy::expect_used, clippy::unwrap_used)] // What tests share is outside of them.

#[path = "../all_families/mod.rs"]
mod all_families;
#[path = "../../../ops/tests/device/mod.rs"]
mod device;
#[path = "../autoencoders/formula.rs"]
#[allow(dead_code)] // Each binary takes what it needs.
mod formula;
#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../open_model/mod.rs"]
mod open_model;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
#[path = "../tiny_ovi/mod.rs"]
mod tiny_ovi;

use ops::Planned;
use pipelines::{Field, Request, Role, Unobserved, Values, families};

use crate::all_families::CASES;
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::shapes_asked::{asked, words};

/// What the first sampling of a request gives, the shapes that it used, and those that were planned.
fn sampled(opened: &OpenModel, request: &Request) -> (Values, Vec<String>, Vec<Planned>) {
    let mut values = Values::new();
    for stage in opened.model.plan(request).expect("a valid request") {
        let (used, given) = asked(|| opened.run(&stage, 0, request, &values, &mut Unobserved));
        let given = given.expect("a stage");
        if stage.role == Role::Sample {
            return (given, used, opened.model.planned(&stage.name, request));
        }
        values.extend(given);
    }
    panic!("nothing is sampled");
}

/// The farthest of the values from those of the same name. What the first round of a solver has none of yet is left out.
fn farthest(found: &Values, expected: &Values) -> f64 {
    let both = found
        .iter()
        .map(|(name, value)| (on_cpu(value), on_cpu(&expected[name])));
    let known = both.filter(|(_, expected)| distance(expected, expected) == 0.0);
    known
        .map(|(found, expected)| distance(&found, &expected))
        .fold(0.0, f64::max)
}

#[test]
fn attention_in_fp8_is_planned_used_and_near_attention_in_full() {
    let mut without = Vec::new();
    for case in &CASES {
        let (name, folder) = (case.name, case.folder());
        let model = families()
            .open(&case.model_in(&folder), &F32)
            .expect("a sound model");
        let full = (case.request)();
        let request = Request {
            fp8_attention: true,
            ..full.clone()
        };
        if !model.reads().has(Field::Fp8Attention) {
            let refused = model.plan(&request).expect_err("a field that is not read");
            assert!(
                refused.iter().any(|problem| problem.field == "fp8_attention"),
                "{name}: {refused:?}"
            );
            without.push(name);
            continue;
        }
        let opened = OpenModel::of(model);
        let (expected, used, _) = sampled(&opened, &full);
        assert!(!used.iter().any(|shape| shape.contains("in_fp8: true")), "{name}");
        let (found, used, planned) = sampled(&opened, &request);
        // Whether others are planned is asked in the tests of each family.
        let in_fp8 = |shapes: Vec<String>| -> Vec<String> {
            let those = shapes.into_iter().filter(|shape| shape.contains("in_fp8: true"));
            those.collect()
        };
        let used = in_fp8(used);
        assert!(!used.is_empty(), "{name}");
        assert_eq!(used, in_fp8(words(&planned)), "{name}");
        let apart = farthest(&found, &expected);
        println!("{name}: {apart:.1e}");
        // Random weights of two steps, of some under true guidance; as near as a rounding of 0.04 in each layer leaves them.
        assert!((1e-5..0.15).contains(&apart), "{name}: {apart}");
    }
    assert_eq!(without, ["sdxl", "ace-step", "ace-step-cover"]);
}
