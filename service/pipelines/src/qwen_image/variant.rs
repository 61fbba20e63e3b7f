//! The inputs from which a checkpoint generates.

use std::path::Path;

use model::bounds;
use model::{Field, Reads};

use crate::text::qwen2_vl::Template;
use crate::{Image, Medium, Request, RequestError};

/// The inputs from which a checkpoint generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Qwen-Image: a prompt, and possibly a picture to start from.
    Text,
    /// Qwen-Image-Edit: a prompt and a picture.
    Edit,
    /// Qwen-Image-Edit-2509 and 2511: a prompt and pictures, which the prompt may name by their numbers.
    EditPlus,
}

impl Variant {
    /// By the class of the pipeline, and the name of the single file in place of its transformer. The tensors are the same in all,
    /// but for a mark in files of 2511 (`is_marked`).
    pub(super) fn of(class: &str, single: Option<&Path>, is_marked: bool) -> Variant {
        let of_class = match class {
            "QwenImageEditPlusPipeline" => Variant::EditPlus,
            "QwenImageEditPipeline" | "QwenImageEditInpaintPipeline" => Variant::Edit,
            _ => Variant::Text,
        };
        let name = single.and_then(Path::file_name).unwrap_or_default();
        let name = name.to_string_lossy().to_ascii_lowercase();
        let is_later = ["2509", "2511", "plus"].iter().any(|part| name.contains(part));
        match (name.contains("edit"), is_marked) {
            (_, true) => Variant::EditPlus,
            (true, false) if is_later => Variant::EditPlus,
            (true, false) => Variant::Edit,
            (false, false) => of_class,
        }
    }

    /// Whether it edits pictures, and so needs at least one.
    pub(super) fn edits(self) -> bool {
        self != Variant::Text
    }

    /// The sentence around a prompt.
    pub(super) fn template(self) -> Template {
        match self {
            Variant::Text => Template::Generate,
            Variant::Edit => Template::Edit,
            Variant::EditPlus => Template::EditPlus,
        }
    }

    /// Most reference pictures. 2509 and 2511 were trained with one to three.
    pub(super) fn most_references(self) -> usize {
        match self {
            Variant::Text => 0,
            Variant::Edit => 1,
            Variant::EditPlus => 3,
        }
    }

    /// Most tokens of a text in its template: the reference cuts none of them where there are pictures.
    pub(super) fn most_tokens(self, request: &Request) -> usize {
        match self {
            Variant::Text => request.max_sequence_length as usize,
            Variant::Edit | Variant::EditPlus => usize::MAX,
        }
    }

    /// The optional fields of a request that the model reads.
    pub(super) fn reads(self) -> Reads {
        const EVERY: Reads = Reads::of(&[
            Field::InitLatent,
            Field::Adapters,
            Field::NegativePrompt,
            Field::TrueGuidance,
            Field::StepCache,
            Field::Fp8Attention,
        ]);
        match self {
            Variant::Text => EVERY.and(&[Field::InitImage, Field::Mask]),
            Variant::Edit | Variant::EditPlus => EVERY.and(&[Field::References]),
        }
    }

    /// The default request, as the model cards have it. Without a negative prompt there is no guidance: it is a space.
    pub(super) fn defaults(self) -> Request {
        let (side, steps) = match self {
            Variant::Text => (1328, 50),
            Variant::Edit => (1024, 50),
            Variant::EditPlus => (1024, 40),
        };
        Request {
            negative_prompt: Some(" ".to_owned()),
            true_guidance: 4.0,
            ..Request::of(Medium::Image(Image::of(side, side)), steps, 0.0, 512)
        }
    }

    /// All fields of a request that are out of bounds.
    pub(super) fn problems(self, request: &Request) -> Vec<RequestError> {
        let mut problems = bounds::problems(request);
        let mut refuse = |field: &'static str, problem: String| {
            if !problems.iter().any(|known| known.field == field) {
                problems.push(RequestError::new(field, problem));
            }
        };
        if request.guidance != 0.0 {
            let problem = format!(
                "is {}; Qwen-Image has no distilled guidance, its guidance is true_guidance: set that, and this to 0",
                request.guidance
            );
            refuse("guidance", problem);
        }
        if let Medium::Image(image) = &request.medium
            && self.edits()
            && image.references.is_empty()
        {
            let problem = "are missing: this Qwen-Image edits pictures, and needs at least one";
            refuse("references", problem.to_owned());
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_what_its_mark_its_name_or_its_base_says() {
        let base = "QwenImageEditPlusPipeline";
        for (class, name, is_marked, expected) in [
            ("QwenImagePipeline", None, false, Variant::Text),
            ("QwenImageEditPipeline", None, false, Variant::Edit),
            (base, None, false, Variant::EditPlus),
            (base, Some("rapid-aio.safetensors"), false, Variant::EditPlus),
            (
                base,
                Some("qwen_image_edit_bf16.safetensors"),
                false,
                Variant::Edit,
            ),
            (
                "QwenImagePipeline",
                Some("Qwen-Image-Edit-2509-Q4_K_S.gguf"),
                false,
                Variant::EditPlus,
            ),
            (
                "QwenImagePipeline",
                Some("mine.safetensors"),
                true,
                Variant::EditPlus,
            ),
            (
                "QwenImagePipeline",
                Some("qwen_image_2512_bf16.safetensors"),
                false,
                Variant::Text,
            ),
        ] {
            let found = Variant::of(class, name.map(Path::new), is_marked);
            assert_eq!(found, expected, "{class} {name:?}");
        }
    }
}
