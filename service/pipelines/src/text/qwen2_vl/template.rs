//! The sentence around a prompt, and the positions of its tokens.

use super::super::tokenizers::{QwenTokenizer, TokenizeError};
use crate::vision::qwen2_vl::Grid;

/// Before the sentence of the system, after it, and after a prompt.
const SYSTEM: &str = "<|im_start|>system\n";
const USER: &str = "<|im_end|>\n<|im_start|>user\n";
const ANSWER: &str = "<|im_end|>\n<|im_start|>assistant\n";

/// The token that stands for each of a picture's tokens, and a picture in the text.
const PICTURE_TOKEN: &str = "<|image_pad|>";
const PICTURE: &str = "<|vision_start|><|image_pad|><|vision_end|>";

/// The sentence around a prompt, to the letter: `prompt_template_encode` of diffusers' pipelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Template {
    /// `QwenImagePipeline`: a picture from a text.
    Generate,
    /// `QwenImageEditPipeline`: of one picture, without a name.
    Edit,
    /// `QwenImageEditPlusPipeline`: of pictures with numbers.
    EditPlus,
}

impl Template {
    /// The text before the user's turn begins with pictures and prompt. The states of its tokens are not used.
    fn head(self) -> String {
        let sentence = match self {
            Template::Generate => concat!(
                "Describe the image by detailing the color, shape, size, texture, quantity, text, ",
                "spatial relationships of the objects and background:",
            ),
            Template::Edit | Template::EditPlus => concat!(
                "Describe the key features of the input image (color, shape, size, texture, objects, background), ",
                "then explain how the user's text instruction should alter or modify the image. ",
                "Generate a new image that meets the user's requirements while maintaining consistency with the ",
                "original input where appropriate.",
            ),
        };
        format!("{SYSTEM}{sentence}{USER}")
    }

    /// The pictures in the user's turn.
    fn pictures(self, count: usize) -> String {
        match self {
            Template::Generate | Template::Edit => PICTURE.repeat(count),
            Template::EditPlus => {
                let named = |number: usize| format!("Picture {number}: {PICTURE}");
                (1..=count).map(named).collect()
            }
        }
    }

    /// A prompt in its template after pictures of these grids. `most` tokens after the head are kept.
    ///
    /// The head is counted, as in the reference: a prompt whose first characters merge with the end of the head loses that
    /// token. Where a prompt has tokens that stand for pictures, those of the template come first.
    ///
    /// # Errors
    /// [`TokenizeError`] for a vocabulary without the token of pictures.
    pub fn encode(
        self,
        tokenizer: &QwenTokenizer,
        prompt: &str,
        pictures: &[Grid],
        most: usize,
    ) -> Result<Prompt, TokenizeError> {
        let head = self.head();
        let text = format!("{head}{}{prompt}{ANSWER}", self.pictures(pictures.len()));
        let head = tokenizer.encode_bare(&head)?.len();
        let mut ids = Vec::new();
        let mut places = Vec::with_capacity(pictures.len());
        let picture_token = match pictures {
            [] => None,
            _ => Some(tokenizer.id(PICTURE_TOKEN)?),
        };
        for id in tokenizer.encode_bare(&text)? {
            match pictures.get(places.len()) {
                Some(grid) if Some(id) == picture_token => {
                    places.push((ids.len(), *grid));
                    ids.extend(std::iter::repeat_n(id, grid.tokens()));
                }
                _ => ids.push(id),
            }
        }
        ids.truncate(head.saturating_add(most));
        Ok(Prompt { ids, head, places })
    }

    /// Tokens of a prompt that [`Template::encode`] leaves out, where there are no pictures.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out(
        self,
        tokenizer: &QwenTokenizer,
        prompt: &str,
        most: usize,
    ) -> Result<usize, TokenizeError> {
        let head = self.head();
        let whole = tokenizer.encode_bare(&format!("{head}{prompt}{ANSWER}"))?.len();
        let kept = tokenizer.encode_bare(&head)?.len().saturating_add(most);
        let end = tokenizer.encode_bare(ANSWER)?.len();
        Ok(whole.saturating_sub(kept).saturating_sub(end))
    }
}

/// The tokens of a prompt in its template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Ids of the template, the pictures' tokens and the prompt.
    pub ids: Vec<u32>,
    /// How many of them, at the beginning, are the template's head, whose states are not used.
    pub head: usize,
    /// The number of each picture's first token, and its grid.
    places: Vec<(usize, Grid)>,
}

impl Prompt {
    /// Number of tokens after the template's head, whose states are used.
    pub fn used(&self) -> usize {
        self.ids.len().saturating_sub(self.head)
    }

    /// Number of tokens of pictures.
    pub fn pictured(&self) -> usize {
        self.pictures().map(|(_, count)| count).sum()
    }

    /// The first token of each picture and the number of its tokens.
    pub(super) fn pictures(&self) -> impl Iterator<Item = (usize, usize)> {
        self.places.iter().map(|(first, grid)| (*first, grid.tokens()))
    }

    /// Positions of every token in time, rows and columns (transformers' `Qwen2_5_VLModel.get_rope_index`): text goes on by
    /// one on all three; all tokens of a picture have the time at which it begins, and rows and columns from there; text goes
    /// on after the larger side of the picture.
    pub fn positions(&self) -> Vec<[u32; 3]> {
        let mut positions = Vec::with_capacity(self.ids.len());
        let mut next = 0u32;
        let mut places = self.places.iter().peekable();
        while positions.len() < self.ids.len() {
            match places.next_if(|(first, _)| *first == positions.len()) {
                Some((_, grid)) => {
                    let [rows, columns] = grid.cells().map(|side| side as u32);
                    let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
                    positions.extend(cells.map(|(row, column)| [next, next + row, next + column]));
                    next += rows.max(columns);
                }
                None => {
                    positions.push([next; 3]);
                    next += 1;
                }
            }
        }
        positions.truncate(self.ids.len());
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_on_after_the_larger_side_of_a_picture() {
        let prompt = Prompt {
            ids: vec![0; 11],
            head: 0,
            places: vec![(3, Grid { rows: 4, columns: 6 })],
        };
        let positions = prompt.positions();
        let axis = |axis: usize| positions.iter().map(|at| at[axis]).collect::<Vec<u32>>();
        assert_eq!(axis(0), [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]);
        assert_eq!(axis(1), [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]);
        assert_eq!(axis(2), [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]);
    }
}
