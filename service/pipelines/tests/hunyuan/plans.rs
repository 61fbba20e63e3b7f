//! Plans and refusals.

use pipelines::{InitImage, Medium, PreviewNeed, Request, Role, Video};

use crate::given::{film_folder, open, picture, request, section_folder, start};
use crate::open_model::{F32, OpenModel};

fn fields(opened: &OpenModel, request: &Request) -> Vec<(String, String)> {
    let refused = opened.model.plan(request).expect_err("a refusal");
    refused
        .into_iter()
        .map(|error| (error.field, error.problem))
        .collect()
}

fn with(request: &Request, change: impl FnOnce(&mut Video)) -> Request {
    let mut request = request.clone();
    if let Medium::Video(video) = &mut request.medium {
        change(video);
    }
    request
}

#[test]
fn each_section_is_sampled_and_decoded_in_stages_of_its_own() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let plan = opened
        .model
        .plan(&request(109, Some(start()), 2, 7))
        .expect("a plan");
    let stages: Vec<_> = plan
        .iter()
        .map(|stage| {
            (
                stage.role,
                stage.section.map(|section| (section.number, section.of)),
            )
        })
        .collect();
    let section = |number| Some((number, 3));
    assert_eq!(
        stages[3..],
        [
            (Role::Sample, section(1)),
            (Role::Decode, section(1)),
            (Role::Sample, section(2)),
            (Role::Decode, section(2)),
            (Role::Sample, section(3)),
            (Role::Decode, section(3)),
        ]
    );
    // A later section takes as much memory as an early one, and sees three sections at most.
    assert_eq!(plan[5].rungs, plan[7].rungs);
    let long = opened
        .model
        .plan(&request(36 * 34 + 1, Some(start()), 2, 7))
        .expect("a plan");
    assert!(long.iter().all(|stage| stage.takes.len() <= 7));
}

/// A stage whose plan says nothing of previews gets no interval for them, and sends none.
#[test]
fn each_sampling_sends_previews_where_they_are_asked_for() {
    for (folder, quiet) in [
        (film_folder(), request(33, None, 2, 7)),
        (section_folder(false), request(109, Some(start()), 2, 7)),
    ] {
        let opened = open(folder.path(), &F32);
        let asked = Request {
            preview: true,
            ..quiet.clone()
        };
        for (request, of_samplings) in [(quiet, None), (asked, Some(PreviewNeed::NOTHING))] {
            for stage in opened.model.plan(&request).expect("a plan") {
                let expected = of_samplings.clone().filter(|_| stage.role == Role::Sample);
                assert_eq!(stage.preview, expected, "{}", stage.name);
                // They cost nothing, and peaks that are learned of a stage hold with them and without.
                assert_eq!(stage.clone().with_previews(), stage);
            }
        }
    }
}

#[test]
fn the_request_of_a_latent_has_its_size_and_length() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let asked = request(109, Some(start()), 2, 7);
    let plan = opened.model.plan(&asked).expect("a plan");
    let mut values: Vec<_> = plan
        .iter()
        .filter(|stage| stage.role == Role::Decode)
        .flat_map(|stage| &stage.takes)
        .filter(|value| value.name != "left")
        .cloned()
        .collect();
    values.sort_by(|one, other| one.name.cmp(&other.name));
    values.dedup();
    let found = opened.model.request_of(&values).expect("a request");
    let film = |request: &Request| match &request.medium {
        Medium::Video(video) => (video.width, video.height, video.frames),
        Medium::Image(_) | Medium::Audio(_) => (0, 0, 0),
    };
    assert_eq!(film(&found), film(&asked));
    assert!(opened.model.plan(&found).is_ok());
    assert!(
        opened.model.request_of(&values[..1]).is_none(),
        "a section is no film"
    );
    assert!(opened.model.request_of(&[]).is_none());
}

#[test]
fn a_field_out_of_bounds_is_refused_by_name() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let sound = request(73, Some(start()), 2, 7);
    assert!(opened.model.plan(&sound).is_ok());
    for frames in [0, 1, 36, 72, 74, 75, 100_000] {
        let [(field, problem)] = &fields(&opened, &with(&sound, |video| video.frames = frames))[..] else {
            panic!("{frames} frames");
        };
        assert_eq!(field, "frames");
        assert!(problem.contains(&frames.to_string()), "{problem}");
    }
    let missing = with(&sound, |video| video.init_image = None);
    assert_eq!(fields(&opened, &missing)[0].0, "init_image");
    let other_shape = with(&sound, |video| video.width = 64);
    assert_eq!(fields(&opened, &other_shape)[0].0, "init_image");
    let ended = |video: &mut Video| video.end_image = Some(picture("end"));
    let to_its_end = with(&sound, ended);
    let stages = opened.model.plan(&to_its_end).expect("a valid request");
    assert!(stages.iter().any(|stage| stage.name == "encode_end"));
    let other_end = with(&to_its_end, |video| video.end_image = Some(black_picture()));
    assert_eq!(fields(&opened, &other_end)[0].0, "end_image");
    let odd = with(&sound, |video| video.height = 33);
    assert!(fields(&opened, &odd).iter().any(|(field, _)| field == "height"));
    let still = with(&sound, |video| video.frames_per_second = 0.0);
    assert_eq!(fields(&opened, &still)[0].0, "frames_per_second");
    let long = Request {
        prompt: "a".repeat(50_000),
        ..sound.clone()
    };
    assert_eq!(fields(&opened, &long)[0].0, "prompt");

    let folder = film_folder();
    let opened = open(folder.path(), &F32);
    let sound = request(33, None, 2, 7);
    assert!(opened.model.plan(&sound).is_ok());
    assert_eq!(
        fields(&opened, &with(&sound, |video| video.frames = 32))[0].0,
        "frames"
    );
    let started = with(&sound, |video| video.init_image = Some(start()));
    assert_eq!(fields(&opened, &started)[0].0, "init_image");
    assert_eq!(fields(&opened, &with(&sound, ended))[0].0, "end_image");

    // A film that is made from its start never sees its end.
    let folder = section_folder(true);
    let opened = open(folder.path(), &F32);
    assert_eq!(fields(&opened, &to_its_end)[0].0, "end_image");
}

/// A picture of another size than the films.
fn black_picture() -> InitImage {
    InitImage {
        width: 16,
        height: 16,
        rgb: vec![0; 3 * 16 * 16].into(),
    }
}

#[test]
fn the_smallest_request_proves_a_model() {
    for folder in [film_folder(), section_folder(false), section_folder(true)] {
        let opened = open(folder.path(), &F32);
        let smallest = opened.model.smallest();
        let (_, film) = opened.film(&smallest, 0);
        let Medium::Video(video) = &smallest.medium else {
            panic!("a film");
        };
        assert_eq!(film.frames().len(), video.frames as usize);
    }
}

#[test]
fn a_length_in_seconds_is_the_nearest_that_the_model_makes() {
    let folder = section_folder(false);
    let sections = open(folder.path(), &F32).model;
    let frames = |seconds: f32| sections.frames_of(seconds, 30.0);
    assert_eq!([0.1, 1.0, 2.0, 5.0, 40.0].map(frames), [37, 37, 73, 145, 1189]);
    let folder = film_folder();
    let whole = open(folder.path(), &F32).model;
    let frames = |seconds: f32| whole.frames_of(seconds, 24.0);
    assert_eq!([0.01, 1.0, 5.0].map(frames), [1, 25, 121]);
}
