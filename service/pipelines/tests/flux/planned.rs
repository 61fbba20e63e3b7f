//! The planned cuDNN shapes of a request equal those that its stages use.

use candle_core::DType;
use pipelines::autoencoders::kl::VaeConfig;
use pipelines::{Image, Medium, Model, Request, Unobserved};

use crate::device;
use crate::given::{STAGES, folder, odd, open, through_stages, with_picture};
use crate::open_model::WantsPreviews;
use crate::shapes_asked::{asked, words};

#[test]
fn stages_use_the_planned_shapes_in_order() {
    let opened = open(folder("dev").path());
    for request in [odd(), with_picture()] {
        through_stages(&opened, &request, |plan, values| {
            let run = || opened.run(plan, 0, &request, values, &mut WantsPreviews);
            let (asked, given) = asked(run);
            let planned = words(&opened.model.planned(&plan.name, &request));
            assert!(!planned.is_empty());
            assert_eq!(asked, planned, "{}", plan.name);
            given.expect("a stage")
        });
    }
}

#[test]
fn strips_use_the_planned_shapes() {
    let dev = folder("dev");
    let opened = open(dev.path());
    let config = std::fs::read(dev.path().join("vae/config.json")).expect("a configuration");
    let config: VaeConfig = serde_json::from_slice(&config).expect("a configuration");
    let (h, w) = (48 / config.factor(), 96 / config.factor());
    let request = with_picture();
    let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
    let mut strips = 0;
    for name in ["encode_image", "decode"] {
        let plan = opened.stage(&request, name);
        for (index, rung) in plan.rungs.iter().enumerate() {
            let Some(rows) = rung.label.strip_prefix("strips of ") else {
                continue;
            };
            let rows = rows.parse().expect("rows");
            let (asked, output) = asked(|| opened.run(&plan, index, &request, &values, &mut Unobserved));
            output.expect("a stage");
            let planned = match name {
                "decode" => config.planned_to_decode((h, w), rows, DType::F32),
                _ => config.planned_to_encode((h, w), rows, DType::F32),
            };
            assert_eq!(asked, words(&planned), "{name} in {}", rung.label);
            strips += 1;
        }
    }
    assert!(strips > 1, "{strips} rungs in strips");
}

#[test]
fn planning_an_invalid_request_does_not_panic() {
    let opened = open(folder("dev").path());
    let picture = with_picture();
    let init_image = picture.medium.init_image().cloned();
    let nothing = Request {
        max_sequence_length: 0,
        medium: Medium::Image(Image {
            init_image,
            ..Image::of(0, 0)
        }),
        ..picture
    };
    for name in STAGES.into_iter().chain(["none"]) {
        let planned = opened.model.planned(name, &nothing);
        ops::make_plans(device::test_device(), &planned);
    }
}
