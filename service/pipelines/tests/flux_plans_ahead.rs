//! Plans of cuDNN that are compiled ahead are not compiled by stages. This is the only test of its process: it counts from the
//! first use of cuDNN on.
#![cfg(feature = "cuda")]
#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux/given.rs"]
mod given;
#[path = "numbers/mod.rs"]
mod numbers;
#[path = "open_model/mod.rs"]
mod open_model;

use std::collections::HashSet;

use ops::{AttentionPaths, Planned, PlansMade, libraries, make_plans};
use pipelines::{Image, Medium, Model, Request};

use device::test_device;
use given::{BF16, STAGES, folder, odd, open_in, through_stages, with_picture};
use open_model::WantsPreviews;

#[test]
fn stages_compile_no_plans_that_were_compiled_ahead() {
    let device = test_device();
    if device.is_cpu() {
        return;
    }
    assert!(libraries().cudnn.is_ok(), "{:?}", libraries().cudnn);
    let opened = open_in(folder("dev").path(), BF16);
    let request = with_picture();
    let planned: Vec<Planned> = STAGES
        .into_iter()
        .flat_map(|name| opened.model.planned(name, &request))
        .collect();
    let shapes: HashSet<&Planned> = planned.iter().collect();
    let run = |request: &Request| {
        through_stages(&opened, request, |plan, values| {
            opened
                .run(plan, 0, request, values, &mut WantsPreviews)
                .expect("a stage")
        });
    };
    let (before, paths) = (PlansMade::now(), AttentionPaths::now());
    for _ in 0..2 {
        make_plans(device, &planned);
    }
    // A plan that is still queued would be compiled by its stage.
    while PlansMade::now().ahead < before.ahead + shapes.len() as u64 {
        std::thread::yield_now();
    }
    for _ in 0..2 {
        run(&request);
        make_plans(device, &planned);
    }
    let now = PlansMade::now();
    assert_eq!(now.ahead - before.ahead, shapes.len() as u64);
    assert_eq!(now.in_stages, before.in_stages);
    assert!(AttentionPaths::now().cudnn > paths.cudnn);

    // Control: a picture of another size was not planned.
    let other = Request {
        medium: Medium::Image(Image::of(64, 64)),
        ..odd()
    };
    run(&other);
    assert!(PlansMade::now().in_stages > now.in_stages);
}
