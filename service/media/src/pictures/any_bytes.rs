//! For any bytes of a picture, its size and its recipe are found or refused.

use bolero::{TypeGenerator, check};

use super::decode::{LONGEST_SIDE_PIXELS, is_cut_jpeg};
use super::encode::RECIPE_KEYWORD;
use super::*;
use crate::edits::{Changes, Edit, edited};
use crate::{Recipe, RecipeAdapter, recipe_of};

/// Whether the recipe is in the chunk that PNG has for long texts.
#[derive(Clone, Debug, TypeGenerator)]
enum Chunk {
    Plain,
    International,
    Compressed,
}

fn recipe() -> Recipe {
    Recipe {
        prompt: "a red square – 🟥".to_owned(),
        adapters: vec![RecipeAdapter::default()],
        window: Some((0.5, None)),
        ..Recipe::default()
    }
}

/// A picture of one pixel with this text in a valid chunk.
fn png_with(chunk: &Chunk, text: &str) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 1, 1);
    encoder.set_color(png::ColorType::Rgb);
    let keyword = RECIPE_KEYWORD.to_owned();
    let added = match chunk {
        Chunk::Plain => encoder.add_text_chunk(keyword, text.to_owned()),
        Chunk::International => encoder.add_itxt_chunk(keyword, text.to_owned()),
        Chunk::Compressed => encoder.add_ztxt_chunk(keyword, text.to_owned()),
    };
    added.unwrap();
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&[1, 2, 3]).unwrap();
    writer.finish().unwrap();
    file
}

/// Changes to the file. Its checksums detect most of them.
#[test]
fn any_picture_is_looked_at_safely() {
    let png = png(4, 2, &[7; 3 * 4 * 2], Some(&recipe())).unwrap();
    let as_other = |format| encode_as(format, &png).unwrap();
    let files = [
        as_other(PictureFormat::Jpeg),
        as_other(PictureFormat::WebP),
        png.clone(),
    ];
    check!()
        .with_iterations(5000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<Changes>()
        .for_each(|changes| {
            let file = changes.of(&files);
            let _ = (media_type(&file), recipe_of(&file), is_cut_jpeg(&file));
            if let Ok((width, height)) = size_of(&file) {
                let sides = 1..=LONGEST_SIDE_PIXELS;
                assert!(sides.contains(&width) && sides.contains(&height));
            }
        });
}

/// Changes to the recipe in a valid file: a recipe that is read is written unchanged.
#[test]
fn any_recipe_is_read_safely() {
    let json = serde_json::to_string(&recipe()).unwrap();
    check!()
        .with_iterations(5000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<(Chunk, Vec<Edit>)>()
        .for_each(|(chunk, edits)| {
            let text = String::from_utf8_lossy(&edited(json.clone().into_bytes(), edits)).into_owned();
            let is_plain = text.chars().all(|c| u32::from(c) <= 0xff) && !text.contains('\0');
            let chunk = if is_plain { chunk } else { &Chunk::International };
            if text.contains('\0') {
                return; // PNG has no such text
            }
            if let Ok(read) = recipe_of(&png_with(chunk, &text)) {
                let again = png(1, 1, &[0; 3], Some(&read)).unwrap();
                assert_eq!(recipe_of(&again).unwrap(), read);
            }
        });
}
