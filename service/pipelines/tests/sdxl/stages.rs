//! Plans, refusals, previews and cancellation.

use pipelines::{
    Image, Medium, Observer, Piece, Request, RequestError, Sampler, StageError, Unobserved, Values,
};

use crate::given::{edit, folder, from_picture, inpaint_folder, open, request, with_mask};
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};

fn fields(opened: &OpenModel, request: &Request) -> Vec<String> {
    let problems: Vec<RequestError> = opened.model.plan(request).expect_err("a refusal");
    problems.into_iter().map(|problem| problem.field).collect()
}

#[test]
fn fields_out_of_bounds_are_refused_by_name() {
    let opened = open(folder().path(), &F32);
    let refused = |request: Request| fields(&opened, &request);
    assert_eq!(
        refused(Request {
            guidance: 7.5,
            ..request()
        }),
        ["guidance"]
    );
    assert_eq!(
        refused(Request {
            medium: Medium::Image(Image::of(81, 48)),
            ..request()
        }),
        ["width"]
    );
    // Of four steps, a fifth is less than one.
    assert_eq!(
        refused(Request {
            steps: 4,
            strength: 0.2,
            ..from_picture()
        }),
        ["strength"]
    );
    assert_eq!(
        refused(Request {
            medium: Medium::Image(Image {
                mask: match with_mask().medium {
                    Medium::Image(image) => image.mask,
                    _ => None,
                },
                ..Image::of(80, 48)
            }),
            ..request()
        }),
        ["mask"]
    );
}

#[test]
fn a_part_of_a_step_is_not_run() {
    let opened = open(folder().path(), &F32);
    for (steps, strength, run) in [(5, 0.8, 4), (5, 0.65, 3), (30, 0.6, 18), (4, 1.0, 4)] {
        let request = Request {
            steps,
            strength,
            ..from_picture()
        };
        assert_eq!(opened.stage(&request, "denoise").steps, run);
    }
}

#[test]
fn a_named_sampler_replaces_that_of_the_checkpoint() {
    let folder = folder();
    let latent = |sampler: Option<Sampler>| {
        let opened = open(folder.path(), &F32);
        let request = Request { sampler, ..request() };
        on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
    };
    let by_request = latent(Some(Sampler::Dpmpp2mKarras));
    let euler = latent(None);
    assert_eq!(distance(&latent(Some(Sampler::Euler)), &euler), 0.0);
    assert!(distance(&by_request, &euler) > 1e-2);
    edit(folder.path(), "scheduler/scheduler_config.json", |config| {
        config["_class_name"] = "DPMSolverMultistepScheduler".into();
        config["use_karras_sigmas"] = true.into();
    });
    assert_eq!(distance(&latent(None), &by_request), 0.0);
    std::fs::write(
        folder.path().join("moored.json"),
        r#"{"sampler": "euler_ancestral"}"#,
    )
    .expect("a file");
    let opened = open(folder.path(), &F32);
    assert_eq!(opened.model.defaults().sampler, Some(Sampler::EulerAncestral));
}

#[test]
fn an_inpainting_unet_reads_the_start_only_where_it_begins_with_it() {
    let opened = open(inpaint_folder().path(), &F32);
    let names = |strength| {
        let request = Request {
            strength,
            ..with_mask()
        };
        let stages = opened.stages(&request).into_iter();
        stages.map(|stage| stage.name).collect::<Vec<_>>()
    };
    let all = [
        "encode_text",
        "encode_image",
        "encode_masked",
        "denoise",
        "decode",
    ];
    assert_eq!(names(0.8), all);
    assert_eq!(names(1.0), [all[0], all[2], all[3], all[4]]);
    // Without a picture all of it is made anew.
    assert!(opened.latent(&request(), &mut Unobserved).is_ok());
    assert!(opened.model.plan(&opened.model.smallest()).is_ok());
}

#[test]
fn a_kept_latent_is_where_another_job_starts() {
    let opened = open(folder().path(), &F32);
    let first = opened.latent(&request(), &mut Unobserved).expect("a latent");
    let further = Request {
        from_values: true,
        strength: 0.7,
        ..request()
    };
    let mut values = Values::from([("latent".to_owned(), first)]);
    for plan in opened.stages(&further).iter().take(2) {
        let given = opened
            .run(plan, 0, &further, &values, &mut Unobserved)
            .expect("values");
        values.extend(given);
    }
    let decoded = opened
        .model
        .request_of(&opened.stage(&further, "decode").takes)
        .expect("a request");
    assert_eq!(decoded.medium.size(), Some((80, 48)));
}

/// Counts steps and previews, and cancels after a number of steps.
#[derive(Default)]
struct Counting {
    steps: Vec<(u32, u32)>,
    previews: Vec<(u32, u32)>,
    cancels_after: Option<usize>,
}

impl Observer for Counting {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        assert_eq!(rgb.len() as u32, 3 * width * height);
        self.previews.push((width, height));
    }
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        self.cancels_after.is_some_and(|after| self.steps.len() >= after)
    }
}

#[test]
fn steps_are_reported_with_previews_and_end_with_a_cancel() {
    let opened = open(folder().path(), &F32);
    let request = from_picture();
    let mut counting = Counting::default();
    opened.latent(&request, &mut counting).expect("a latent");
    assert_eq!(counting.steps, [(1, 4), (2, 4), (3, 4), (4, 4)]);
    assert_eq!(counting.previews, [(40, 24); 3]);

    let mut cancelling = Counting {
        cancels_after: Some(2),
        ..Counting::default()
    };
    let cancelled = opened.latent(&request, &mut cancelling);
    assert!(matches!(cancelled, Err(StageError::Cancelled)), "{cancelled:?}");
    assert_eq!(cancelling.steps.len(), 2);
}
