//! The planned cuDNN shapes of a sampling equal those that its steps use, also where one of two prompts is shorter.

use pipelines::{Request, Unobserved, Values};

use crate::given::{film_folder, open, request, section_folder, start};
use crate::open_model::{F32, OpenModel};
use crate::shapes_asked::{asked, words};

/// Runs a request up to its first sampling, whose shapes are compared.
fn assert_planned(opened: &OpenModel, request: &Request) {
    let mut values = Values::new();
    for plan in opened.stages(request) {
        let run = || opened.run(&plan, 0, request, &values, &mut Unobserved);
        let (asked, given) = asked(run);
        if plan.name == "denoise" {
            let planned = words(&opened.model.planned(&plan.name, request));
            assert!(!planned.is_empty());
            assert_eq!(asked, planned);
            return;
        }
        values.extend(given.expect("a stage"));
    }
    panic!("nothing is sampled");
}

#[test]
fn steps_use_the_planned_shapes_in_order() {
    for (folder, alone) in [
        (film_folder(), request(9, None, 2, 7)),
        (section_folder(false), request(37, Some(start()), 2, 7)),
    ] {
        let opened = open(folder.path(), &F32);
        let guided = |prompt: &str, negative: &str| Request {
            prompt: prompt.to_owned(),
            negative_prompt: Some(negative.to_owned()),
            true_guidance: 3.0,
            ..alone.clone()
        };
        let (short, long) = ("a cat", "a large green circle on the left of a small red square");
        for request in [
            alone.clone(),
            guided(long, short),
            guided(short, long),
            guided(short, short),
        ] {
            assert_planned(&opened, &request);
        }
    }
}
