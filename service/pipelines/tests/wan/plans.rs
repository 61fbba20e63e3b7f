//! What plans say of memory, lengths and sizes.

use std::collections::BTreeSet;

use pipelines::{Medium, Unobserved, ValueShape, Values};

use crate::given::{ALL, I2V, T2V, TI2V, open};
use crate::open_model::F32;
use crate::shapes_asked::{asked, words};

#[test]
fn the_nearest_length_and_size_are_offered() {
    let folder = TI2V.folder();
    let opened = open(folder.path(), &F32);
    let model = &opened.model;
    assert_eq!(model.size_near(1290, 720), (1280, 704));
    assert_eq!(model.frames_of(5.0, 24.0), 121);
    assert_eq!(model.frames_of(0.0, 24.0), 1);
    for (_, smaller) in model.smaller(&TI2V.request()) {
        assert!(model.plan(&smaller).is_ok());
    }
}

#[test]
fn a_latent_says_which_film_it_is() {
    for made in [T2V, I2V] {
        let folder = made.folder();
        let opened = open(folder.path(), &F32);
        let value = |shape: Vec<usize>| [ValueShape::new("latent", shape)];
        let request = opened
            .model
            .request_of(&value(vec![1, 4, 3, 4, 6]))
            .expect("a film");
        let Medium::Video(video) = &request.medium else {
            panic!("a film");
        };
        assert_eq!((video.width, video.height, video.frames), (48, 32, 9));
        let plan = opened.model.plan(&request).expect("a plan");
        assert_eq!(plan.last().expect("a decode").takes[0].shape, [1, 4, 3, 4, 6]);
        assert!(opened.model.request_of(&value(vec![1, 5, 3, 4, 6])).is_none());
    }
}

#[test]
fn later_rungs_need_less() {
    for made in ALL {
        let folder = made.folder();
        let opened = open(folder.path(), &F32);
        for stage in opened.model.plan(&made.request()).expect("a plan") {
            for pair in stage.rungs.windows(2) {
                assert!(pair[1].scratch < pair[0].scratch, "{} {}", made.name, stage.name);
            }
        }
    }
}

#[test]
fn sampling_and_decoding_use_the_planned_shapes() {
    for made in ALL {
        let folder = made.folder();
        let opened = open(folder.path(), &F32);
        let request = made.request();
        let mut values = Values::new();
        for plan in opened.model.plan(&request).expect("a valid request") {
            let run = || opened.run(&plan, 0, &request, &values, &mut Unobserved);
            let (asked, given) = asked(run);
            let planned = words(&opened.model.planned(&plan.name, &request));
            let [asked, planned] = [asked, planned].map(|shapes| shapes.into_iter().collect::<BTreeSet<_>>());
            assert_eq!(asked, planned, "{} {}", made.name, plan.name);
            values.extend(given.expect("a stage"));
        }
    }
}

/// Both passes of a step of a small film are one; those of a large film, which fill a card alone, follow each other.
#[test]
fn passes_of_large_films_follow_each_other() {
    let folder = T2V.folder();
    let opened = open(folder.path(), &F32);
    let sampling = |frames: u32| {
        let mut request = T2V.request();
        if let Medium::Video(video) = &mut request.medium {
            (video.width, video.height, video.frames) = (832, 480, frames);
        }
        let plan = opened.model.plan(&request).expect("a plan");
        plan.into_iter()
            .find(|stage| stage.name == "denoise")
            .expect("a stage")
    };
    let (small, large) = (sampling(17), sampling(81));
    assert_eq!((small.rungs.len(), small.passes.in_step), (2, 1));
    assert_eq!((large.rungs.len(), large.passes.in_step), (1, 2));
}
