//! Reference pictures, whose tokens follow those of the generated picture: `Flux2KleinPipeline` without and
//! `Flux2KleinInpaintPipeline` with a picture to start from, which is a reference too.

use model::ReferenceFit;
use model::bounds::PIXELS_PER_TOKEN;

use super::model::Flux2Model;
use crate::place::Place;
use crate::start::is_from_latent;
use crate::{Image, InitImage, Request, RequestError, StagePlan, ValueShape};

/// Name of the stage of a reference picture, followed by its number.
pub(super) const ENCODE_REFERENCE: &str = "encode_reference_";

/// Name of a reference's latent, f32 `[1, channels, height / 16, width / 16]` in the transformer's scale, followed by its number.
pub(super) const REFERENCE: &str = "reference_";

/// Most reference pictures. The reference has no bound; each has as many tokens as the picture itself.
pub(super) const MOST: usize = 8;

/// Pixels of a reference picture, above which it is scaled.
const MOST_PIXELS: u64 = 1024 * 1024;

/// Least side of a reference picture, and most times that one side is as long as the other (`check_image_input`).
const LEAST_SIDE: u32 = 64;
const MOST_ASPECT: u32 = 8;

/// How a reference picture of this size is taken: scaled to a megapixel if it has more, and cut to whole tokens around its
/// middle.
pub(super) fn fit(width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
    let refuse = |problem: String| Err(RequestError::new("references", problem));
    if width < LEAST_SIDE || height < LEAST_SIDE {
        return refuse(format!(
            "one is {width}x{height}; sides of at least {LEAST_SIDE} pixels are expected"
        ));
    }
    let (long, short) = (width.max(height), width.min(height));
    if u64::from(long) > u64::from(MOST_ASPECT) * u64::from(short) {
        return refuse(format!(
            "one is {width}x{height}; one side may be at most {MOST_ASPECT} times as long as the other"
        ));
    }
    let pixels = u64::from(width) * u64::from(height);
    let scaled = match pixels > MOST_PIXELS {
        false => (width, height),
        true => {
            let scale = (MOST_PIXELS as f64 / pixels as f64).sqrt();
            let side = |side: u32| (f64::from(side) * scale) as u32;
            (side(width), side(height))
        }
    };
    let whole = |side: u32| side / PIXELS_PER_TOKEN * PIXELS_PER_TOKEN;
    Ok(ReferenceFit {
        scaled,
        size: (whole(scaled.0), whole(scaled.1)),
        seen: None,
    })
}

/// The places of all pictures that the generated one refers to: the start, then the references.
pub(super) fn places(request: &Request, image: &Image) -> Vec<Place> {
    let start = is_from_latent(request).then(|| Place::of_picture(image.width, image.height));
    let references = image.references.iter();
    let references = references.map(|reference| Place::of_picture(reference.width, reference.height));
    start.into_iter().chain(references).collect()
}

impl Flux2Model {
    /// The stages that encode the reference pictures.
    pub(super) fn reference_stages(&self, image: &Image) -> Vec<StagePlan> {
        let autoencoder = self.autoencoder();
        let references = image.references.iter().enumerate();
        let stages = references.map(|(number, reference)| {
            let (name, value) = (
                format!("{ENCODE_REFERENCE}{number}"),
                format!("{REFERENCE}{number}"),
            );
            autoencoder.reference_stage(&name, &value, reference)
        });
        stages.collect()
    }

    /// The values of those stages.
    pub(super) fn reference_values(&self, image: &Image) -> impl Iterator<Item = ValueShape> {
        let shape = |reference: &InitImage| {
            let size = Image::of(reference.width, reference.height);
            self.autoencoder().latent(&size).shape
        };
        let references = image.references.iter().enumerate();
        references.map(move |(number, reference)| {
            ValueShape::new(&format!("{REFERENCE}{number}"), shape(reference))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_scaled_to_a_megapixel_and_cut_to_whole_tokens() {
        let fitted = |width, height| fit(width, height).map(|fit| (fit.scaled, fit.size));
        assert_eq!(fitted(640, 487), Ok(((640, 487), (640, 480))));
        assert_eq!(fitted(1024, 1024), Ok(((1024, 1024), (1024, 1024))));
        assert_eq!(fitted(1920, 1080), Ok(((1365, 768), (1360, 768))));
        for (width, height) in [(63, 200), (200, 63), (64, 513), (1000, 124)] {
            let problem = fitted(width, height).unwrap_err();
            assert_eq!(problem.field, "references", "{width}x{height}");
        }
        assert!(fitted(512, 64).is_ok());
    }
}
