//! The planned cuDNN shapes of an ACE-Step request equal those that its sampling uses.

use std::collections::BTreeSet;

use pipelines::{AudioTask, Kept, Request, Role, StageRun, Unobserved, Values};

use crate::device::test_device;
use crate::given::{folder, new_track, of_source, open};
use crate::open_model::F32;
use crate::shapes_asked::{asked, words};

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
        let opened = open(folder.path(), &F32);
        let mut values = Values::new();
        for plan in opened.model.plan(&request).expect("a valid request") {
            let run = || opened.run(&plan, 0, &request, &values, &mut Unobserved);
            let (asked, given) = asked(run);
            let planned = words(&opened.model.planned(&plan.name, &request));
            // Encoders of a few layers are not planned: their plans are made when the stage asks for them.
            if ["denoise", "decode", "encode_source"].contains(&plan.name.as_str()) {
                let [asked, planned] =
                    [asked, planned].map(|shapes| shapes.into_iter().collect::<BTreeSet<_>>());
                assert_eq!(asked, planned, "{}", plan.name);
            }
            values.extend(given.expect("a stage"));
        }
    }
}

#[test]
fn shared_passes_use_the_planned_shapes() {
    let folder = folder(false);
    let opened = open(folder.path(), &F32);
    let of_prompt = |prompt: &str| Request {
        prompt: prompt.to_owned(),
        slots: 3,
        steps: 3,
        ..new_track()
    };
    let [one, another] = ["a waltz", "a march with a great many drums"].map(of_prompt);
    let planned = opened.model.planned("denoise", &one);
    let [one, another] = [one, another].map(|request| {
        let mut values = Values::new();
        let plans = opened.model.plan(&request).expect("a valid request");
        let mut plans = plans.into_iter();
        loop {
            let plan = plans.next().expect("a stage");
            if plan.role == Role::Sample {
                break (plan, request, values);
            }
            let given = opened.run(&plan, 0, &request, &values, &mut Unobserved);
            values.extend(given.expect("values"));
        }
    });
    let tensors = |name: &str| Ok(opened.tensors(name));
    let [one, another] = [&one, &another].map(|(plan, request, values)| StageRun {
        plan,
        rung: 0,
        request,
        values,
        tensors: &tensors,
        device: test_device(),
        part: None,
    });
    let mut used = BTreeSet::new();
    let passes = [
        vec![one],
        vec![one; 2],
        vec![one; 3],
        vec![one, another],
        vec![one, another, one],
    ];
    for stages in passes {
        let (asked, given) = asked(|| {
            opened
                .model
                .run_shared(&stages, &mut Kept::default(), &mut Unobserved)
        });
        assert_eq!(given.expect("values").len(), stages.len());
        used.extend(asked);
    }
    assert_eq!(used, words(&planned).into_iter().collect::<BTreeSet<_>>());
}
