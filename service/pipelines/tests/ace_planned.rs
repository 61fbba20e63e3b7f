//! The planned cuDNN shapes of an ACE-Step request equal those that its sampling uses.

#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/numbers.rs"]
mod numbers;
#[path = "resident/mod.rs"]
mod resident;
mod shapes_asked;
#[allow(dead_code)] // each binary takes what it needs
#[path = "ace_parity/workshop.rs"]
mod workshop;

use std::collections::BTreeSet;

use pipelines::{AudioTask, Request, Unobserved, Values};

use shapes_asked::{asked, words};
use workshop::{F32, Workshop, folder, new_track, of_source};

#[test]
fn sampling_uses_the_planned_shapes() {
    let (turbo, base) = (folder(false), folder(true));
    let guided = Request {
        guidance: 7.0,
        ..new_track()
    };
    let mixed = Request {
        strength: 0.5,
        ..of_source(AudioTask::Cover)
    };
    for (folder, request) in [(&turbo, new_track()), (&turbo, mixed), (&base, guided)] {
        let workshop = Workshop::open(folder.path(), &F32);
        let mut values = Values::new();
        for plan in workshop.model.plan(&request).expect("a valid request") {
            let run = || workshop.run(&plan, 0, &request, &values, &mut Unobserved);
            let (asked, given) = asked(run);
            let planned = words(&workshop.model.planned(&plan.name, &request));
            // Encoders of a few layers are not planned: what they ask for is made when it is asked for.
            if ["denoise", "decode", "encode_source"].contains(&plan.name.as_str()) {
                let [asked, planned] =
                    [asked, planned].map(|shapes| shapes.into_iter().collect::<BTreeSet<_>>());
                assert_eq!(asked, planned, "{}", plan.name);
            }
            values.extend(given.expect("a stage"));
        }
    }
}
