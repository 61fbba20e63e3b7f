//! The inputs from which a checkpoint generates, and how it is sampled unless a request says otherwise.

use std::path::Path;

use model::bounds;
use model::{Field, Reads};

use crate::flow_match::SchedulerConfig;
use crate::{Image, Medium, Request, RequestError};

/// Which of both published models a checkpoint is. Their tensors and configurations are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Z-Image-Turbo: few steps, without guidance.
    Turbo,
    /// Z-Image: many steps under true guidance.
    Base,
}

/// How files are named that hold their numbers in one of these formats: `z_image_bf16`, `z-image-Q8_0`.
const FORMATS: [&str; 13] = [
    "bf16", "fp16", "f16", "fp32", "f32", "fp8", "int8", "int4", "nvfp4", "mxfp8", "mxfp4", "iq", "ud",
];

impl Variant {
    /// By the name of the single file in place of its transformer, or else by the shift of its pipeline's scheduler.
    pub(super) fn of(single: Option<&Path>, scheduler: &SchedulerConfig) -> Variant {
        let named = single.and_then(Path::file_stem).and_then(|stem| {
            let letters = stem.to_str()?.chars().filter(|letter| letter.is_alphanumeric());
            Variant::named(&letters.flat_map(char::to_lowercase).collect::<String>())
        });
        named.unwrap_or(Variant::of_scheduler(scheduler))
    }

    /// The variant that the letters and digits of a file's name say, in lower case. Files that are called Z-Image and nothing
    /// else hold the base model; what others made of either has further words, which say nothing.
    fn named(letters: &str) -> Option<Variant> {
        if letters.contains("turbo") {
            return Some(Variant::Turbo);
        }
        if letters.contains("base") {
            return Some(Variant::Base);
        }
        let rest = letters.strip_prefix("zimage")?;
        let is_quantized = rest
            .strip_prefix('q')
            .is_some_and(|rest| rest.starts_with(char::is_numeric));
        let is_format = is_quantized || FORMATS.iter().any(|format| rest.starts_with(format));
        (rest.is_empty() || is_format).then_some(Variant::Base)
    }

    /// The variant whose published shift is the nearer one.
    fn of_scheduler(scheduler: &SchedulerConfig) -> Variant {
        let between = f64::midpoint(Variant::Turbo.shift(), Variant::Base.shift());
        match !scheduler.use_dynamic_shifting && scheduler.shift > between {
            true => Variant::Base,
            false => Variant::Turbo,
        }
    }

    /// The shift of the sigmas in the published scheduler.
    fn shift(self) -> f64 {
        match self {
            Variant::Turbo => 3.0,
            Variant::Base => 6.0,
        }
    }

    /// The schedule of the variant: that of its pipeline, or of a file whose companions are the other variant's, the published
    /// one.
    pub(super) fn scheduler(self, of_pipeline: SchedulerConfig) -> SchedulerConfig {
        match Variant::of_scheduler(&of_pipeline) == self {
            true => of_pipeline,
            false => of_pipeline.with_shift(self.shift()),
        }
    }

    /// The optional fields of a request that the model reads.
    pub(super) fn reads(self) -> Reads {
        // Turbo is used with a little guidance too, for which it was not distilled.
        Reads::of(&[
            Field::InitImage,
            Field::InitLatent,
            Field::Mask,
            Field::Adapters,
            Field::NegativePrompt,
            Field::TrueGuidance,
            Field::Fp8Attention,
        ])
    }

    /// The default request, as the model cards have it: a true guidance is 1 more than their `guidance_scale`.
    pub(super) fn defaults(self) -> Request {
        let of = |steps| {
            Request::of(
                Medium::Image(Image::of(1024, 1024)),
                steps,
                0.0,
                model::MAX_TOKENS,
            )
        };
        match self {
            Variant::Turbo => of(8),
            Variant::Base => Request {
                negative_prompt: Some(String::new()),
                true_guidance: 5.0,
                ..of(50)
            },
        }
    }

    /// All fields of a request that are out of bounds.
    pub(super) fn problems(self, request: &Request) -> Vec<RequestError> {
        let mut problems = bounds::problems(request);
        if request.guidance != 0.0 && !problems.iter().any(|problem| problem.field == "guidance") {
            let instead = match self {
                Variant::Turbo => {
                    "Z-Image-Turbo is distilled, without guidance: set it to 0, and with a negative prompt set true_guidance instead"
                }
                Variant::Base => {
                    "Z-Image has no distilled guidance, its guidance is true_guidance: set that, and this to 0"
                }
            };
            let problem = format!("is {}; {instead}", request.guidance);
            problems.push(RequestError::new("guidance", problem));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shifted(shift: f64) -> SchedulerConfig {
        SchedulerConfig {
            shift,
            ..SchedulerConfig::default()
        }
    }

    #[test]
    fn a_file_is_what_its_name_or_the_scheduler_says() {
        let (turbo, base) = (Variant::Turbo, Variant::Base);
        // With companions of Turbo, and of the base model.
        for (name, of_turbo, of_base) in [
            ("z_image_turbo_bf16.safetensors", turbo, turbo),
            ("Z-Image-Turbo-Q4_K_M.gguf", turbo, turbo),
            ("z_image_bf16.safetensors", base, base),
            ("z-image-Q8_0.gguf", base, base),
            ("z-image-UD-Q4_K_XL.gguf", base, base),
            ("Z-Image.safetensors", base, base),
            ("Z-Image-Base-fp8.safetensors", base, base),
            ("z-image-quiet-portraits.safetensors", turbo, base),
            ("mine.safetensors", turbo, base),
        ] {
            let of = |shift| Variant::of(Some(Path::new(name)), &shifted(shift));
            assert_eq!((of(3.0), of(6.0)), (of_turbo, of_base), "{name}");
        }
        assert_eq!(Variant::of(None, &shifted(3.0)), turbo);
        assert_eq!(Variant::of(None, &shifted(6.0)), base);
    }

    #[test]
    fn a_file_with_companions_of_the_other_variant_has_its_own_shift() {
        for (variant, of_pipeline, expected) in [
            (Variant::Turbo, 3.0, 3.0),
            (Variant::Turbo, 2.5, 2.5),
            (Variant::Turbo, 6.0, 3.0),
            (Variant::Base, 6.0, 6.0),
            (Variant::Base, 3.0, 6.0),
        ] {
            assert_eq!(variant.scheduler(shifted(of_pipeline)).shift, expected);
        }
    }
}
