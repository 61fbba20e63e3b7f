//! A sampling of whose two passes each of two devices computes one equals that of one device.

use pipelines::{Request, StageError, Unobserved, Values};

use crate::given::{ALL, T2V, open};
use crate::numbers::distance;
use crate::open_model::{F32, on_cpu};
use crate::shapes_asked::words;
use crate::two_devices::together;

fn on_two(request: &Request) -> Request {
    Request {
        cards: 2,
        ..request.clone()
    }
}

#[test]
fn two_devices_sample_what_one_does() {
    for made in ALL {
        let (folder, alone) = (made.folder(), made.request());
        let request = on_two(&alone);
        let opened = open(folder.path(), &F32);
        let (mut values, mut expected) = (Values::new(), Values::new());
        for (plan, of_one) in opened.stages(&request).iter().zip(opened.stages(&alone)) {
            match plan.name.as_str() {
                "decode" => continue,
                name if name.starts_with("denoise") => {}
                _ => {
                    let given = opened
                        .run(plan, 0, &request, &values, &mut Unobserved)
                        .expect("a stage");
                    values.extend(given.clone());
                    expected.extend(given);
                    continue;
                }
            }
            let of_one = opened
                .run(&of_one, 0, &alone, &expected, &mut Unobserved)
                .expect("a stage");
            let planned = words(&opened.model.planned(&plan.name, &request));
            let [first, second] = together(u32::MAX, |part, observer| {
                let opened = open(folder.path(), &F32);
                opened.run_part(Some(part), (plan, 0), &request, &values, observer)
            });
            let (given, _, shapes) = first;
            let given = given.expect("a stage");
            assert_eq!(given, second.0.expect("a stage"), "both have all of it");
            assert!(shapes.iter().all(|shape| planned.contains(shape)), "{shapes:?}");
            for (name, value) in &given {
                let apart = distance(&on_cpu(value), &on_cpu(&of_one[name]));
                assert!(apart < 2e-6, "{} {name}: {apart:e}", made.name);
            }
            values.extend(given);
            expected.extend(of_one);
        }
    }
}

#[test]
fn a_device_that_is_cancelled_ends_the_other() {
    let (folder, request) = (T2V.folder(), on_two(&T2V.request()));
    let opened = open(folder.path(), &F32);
    let mut values = Values::new();
    let plan = opened.stage(&request, "denoise");
    values.extend(
        opened
            .run(
                &opened.stage(&request, "encode_text"),
                0,
                &request,
                &values,
                &mut Unobserved,
            )
            .expect("a stage"),
    );
    let [first, second] = together(1, |part, observer| {
        let opened = open(folder.path(), &F32);
        opened.run_part(Some(part), (&plan, 0), &request, &values, observer)
    });
    assert!(first.0.is_err(), "the other one is gone");
    assert!(matches!(second.0, Err(StageError::Cancelled)), "{:?}", second.0);
}

#[test]
fn a_film_of_one_pass_is_for_one_card() {
    let (folder, alone) = (T2V.folder(), T2V.request());
    let opened = open(folder.path(), &F32);
    let request = Request {
        true_guidance: 1.0,
        negative_prompt: None,
        ..on_two(&alone)
    };
    let problems = opened.model.plan(&request).expect_err("a refusal");
    assert!(
        problems.iter().any(|problem| problem.field == "cards"),
        "{problems:?}"
    );
    let alone = Request { cards: 1, ..request };
    assert!(opened.model.plan(&alone).is_ok());
}
