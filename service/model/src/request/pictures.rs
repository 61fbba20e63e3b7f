//! The pictures of a request, in one list of the fields that have them.

use bytes::Bytes;

use super::{Image, InitImage, Medium};

/// The fields of a request that hold a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureSlot {
    /// The picture to start from.
    Start,
    /// The picture that a film ends with.
    End,
    Mask,
    /// One of the references, by its index.
    Reference(usize),
    /// The same in the size in which a text encoder sees it.
    Seen(usize),
    /// The picture of a ControlNet, by its index.
    Control(usize),
}

/// A picture of a request.
#[derive(Debug)]
pub struct Picture<'a> {
    pub slot: PictureSlot,
    /// Width and height in pixels.
    pub size: (u32, u32),
    /// RGB, or the grey of a mask, 8 bits each, row-major; empty where only the size counts.
    pub data: &'a Bytes,
}

/// A picture of a request, to be changed.
#[derive(Debug)]
pub struct PictureMut<'a> {
    pub slot: PictureSlot,
    pub width: &'a mut u32,
    pub height: &'a mut u32,
    /// The data of [`Picture`], to be changed.
    pub data: &'a mut Bytes,
}

impl Picture<'_> {
    /// Bytes of its data when complete.
    pub fn whole_bytes(&self) -> u64 {
        let channels = match self.slot {
            PictureSlot::Mask => 1,
            PictureSlot::Start
            | PictureSlot::End
            | PictureSlot::Reference(_)
            | PictureSlot::Seen(_)
            | PictureSlot::Control(_) => 3,
        };
        channels * u64::from(self.size.0) * u64::from(self.size.1)
    }
}

fn rgb(slot: PictureSlot, image: &InitImage) -> Picture<'_> {
    Picture {
        slot,
        size: (image.width, image.height),
        data: &image.rgb,
    }
}

fn rgb_mut(slot: PictureSlot, image: &mut InitImage) -> PictureMut<'_> {
    PictureMut {
        slot,
        width: &mut image.width,
        height: &mut image.height,
        data: &mut image.rgb,
    }
}

/// The fields of a picture's request are all named here, so that a new one is not forgotten.
impl Medium {
    /// The pictures of the medium.
    pub fn pictures(&self) -> Vec<Picture<'_>> {
        let image = match self {
            Medium::Image(image) => image,
            Medium::Video(video) => {
                let start = video
                    .init_image
                    .iter()
                    .map(|image| rgb(PictureSlot::Start, image));
                let end = video.end_image.iter().map(|image| rgb(PictureSlot::End, image));
                return start.chain(end).collect();
            }
            Medium::Audio(_) => return Vec::new(),
        };
        let Image {
            width: _,
            height: _,
            init_image,
            mask,
            references,
            controls,
            seen,
        } = image;
        let mut pictures = Vec::new();
        pictures.extend(init_image.iter().map(|image| rgb(PictureSlot::Start, image)));
        pictures.extend(mask.iter().map(|mask| Picture {
            slot: PictureSlot::Mask,
            size: (mask.width, mask.height),
            data: &mask.grey,
        }));
        let references = references.iter().enumerate();
        pictures.extend(references.map(|(index, image)| rgb(PictureSlot::Reference(index), image)));
        let seen = seen.iter().enumerate();
        pictures.extend(seen.map(|(index, image)| rgb(PictureSlot::Seen(index), image)));
        let controls = controls.iter().enumerate();
        pictures.extend(controls.map(|(index, control)| rgb(PictureSlot::Control(index), &control.image)));
        pictures
    }

    /// As [`Medium::pictures`], to be changed.
    pub fn pictures_mut(&mut self) -> Vec<PictureMut<'_>> {
        let image = match self {
            Medium::Image(image) => image,
            Medium::Video(video) => {
                let start = video.init_image.iter_mut();
                let start = start.map(|image| rgb_mut(PictureSlot::Start, image));
                let end = video.end_image.iter_mut();
                let end = end.map(|image| rgb_mut(PictureSlot::End, image));
                return start.chain(end).collect();
            }
            Medium::Audio(_) => return Vec::new(),
        };
        let Image {
            width: _,
            height: _,
            init_image,
            mask,
            references,
            controls,
            seen,
        } = image;
        let mut pictures = Vec::new();
        pictures.extend(
            init_image
                .iter_mut()
                .map(|image| rgb_mut(PictureSlot::Start, image)),
        );
        pictures.extend(mask.iter_mut().map(|mask| PictureMut {
            slot: PictureSlot::Mask,
            width: &mut mask.width,
            height: &mut mask.height,
            data: &mut mask.grey,
        }));
        let references = references.iter_mut().enumerate();
        pictures.extend(references.map(|(index, image)| rgb_mut(PictureSlot::Reference(index), image)));
        let seen = seen.iter_mut().enumerate();
        pictures.extend(seen.map(|(index, image)| rgb_mut(PictureSlot::Seen(index), image)));
        let controls = controls.iter_mut().enumerate();
        pictures.extend(
            controls.map(|(index, control)| rgb_mut(PictureSlot::Control(index), &mut control.image)),
        );
        pictures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{ControlUse, Mask, Request, Video};
    use crate::smaller::smaller_sides;

    fn picture(side: u32) -> InitImage {
        let whole = InitImage::of_size((side, side));
        InitImage {
            rgb: vec![7; whole.whole_bytes() as usize].into(),
            ..whole
        }
    }

    /// A request for 64 by 64 pixels with a picture in every slot; references of 32 and 16 pixels, seen in 24 and 8.
    fn with_all() -> Request {
        let control = ControlUse {
            name: "edges".into(),
            image: picture(64),
            scale: 1.0,
            start: 0.0,
            end: 1.0,
            mode: None,
        };
        let image = Image {
            init_image: Some(picture(64)),
            mask: Some(Mask {
                grey: vec![255; 64 * 64].into(),
                ..Mask::of_size((64, 64))
            }),
            references: vec![picture(32), picture(16)],
            seen: vec![picture(24), picture(8)],
            controls: vec![control],
            ..Image::of(64, 64)
        };
        Request::of(Medium::Image(image), 1, 0.0, 1)
    }

    #[test]
    fn every_picture_of_a_request_is_walked_over() {
        let mut request = with_all();
        let pictures = request.medium.pictures();
        let slots: Vec<PictureSlot> = pictures.iter().map(|picture| picture.slot).collect();
        let expected = [
            PictureSlot::Start,
            PictureSlot::Mask,
            PictureSlot::Reference(0),
            PictureSlot::Reference(1),
            PictureSlot::Seen(0),
            PictureSlot::Seen(1),
            PictureSlot::Control(0),
        ];
        assert_eq!(slots, expected);
        let whole: u64 = pictures.iter().map(Picture::whole_bytes).sum();
        assert_eq!(
            (whole, request.lacks_media_data()),
            (request.input_bytes(), false)
        );
        let to_change = request.medium.pictures_mut();
        let slots: Vec<PictureSlot> = to_change.iter().map(|picture| picture.slot).collect();
        assert_eq!(slots, expected);
        let bare = request.without_media_data();
        assert_eq!((bare.input_bytes(), bare.lacks_media_data()), (0, true));
    }

    #[test]
    fn the_pictures_of_a_film_are_its_first_and_its_last() {
        let film = Video {
            init_image: Some(picture(64)),
            end_image: Some(picture(32)),
            ..Video::default()
        };
        let mut request = Request::of(Medium::Video(film), 1, 0.0, 1);
        let expected = [PictureSlot::Start, PictureSlot::End];
        let pictures = request.medium.pictures();
        assert!(pictures.iter().map(|picture| picture.slot).eq(expected));
        let whole: u64 = pictures.iter().map(Picture::whole_bytes).sum();
        assert_eq!(whole, request.input_bytes());
        let to_change = request.medium.pictures_mut();
        assert!(to_change.iter().map(|picture| picture.slot).eq(expected));
        assert!(request.without_media_data().lacks_media_data());
    }

    #[test]
    fn smaller_requests_have_the_sizes_of_their_pictures_without_data() {
        let smaller = smaller_sides(&with_all(), 16);
        let labels: Vec<&str> = smaller.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, ["48x48", "32x32", "16x16"]);
        for (_, request) in smaller {
            let (width, height) = request.medium.size().unwrap();
            assert_eq!(request.input_bytes(), 0, "data of a picture is kept");
            for picture in request.medium.pictures() {
                let expected = match picture.slot {
                    PictureSlot::Reference(0) => (32, 32),
                    PictureSlot::Reference(_) => (16, 16),
                    PictureSlot::Seen(0) => (24, 24),
                    PictureSlot::Seen(_) => (8, 8),
                    _ => (width, height),
                };
                assert_eq!(picture.size, expected, "{:?}", picture.slot);
            }
        }
    }
}
