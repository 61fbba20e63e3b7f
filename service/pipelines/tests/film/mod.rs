//! Whole films of a model, as they are delivered.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use pipelines::{Observer, Piece, Request, Values};

use crate::open_model::OpenModel;

impl OpenModel {
    /// Runs all stages on their rungs of this number: all values, and the film.
    pub(crate) fn film(&self, request: &Request, rung: usize) -> (Values, Film) {
        let plan = self.model.plan(request).expect("a valid request");
        let mut values = Values::new();
        let mut film = Film::default();
        for stage in &plan {
            let rung = rung.min(stage.rungs.len() - 1);
            let given = self
                .run(stage, rung, request, &values, &mut film)
                .expect("a stage");
            values.extend(given);
        }
        (values, film)
    }
}

/// A film as it is delivered.
#[derive(Default)]
pub(crate) struct Film {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) steps: Vec<(u32, u32)>,
    /// Width, height and bytes of each preview.
    pub(crate) previews: Vec<(u32, u32, Vec<u8>)>,
}

impl Film {
    /// All frames, each of which was delivered once.
    pub(crate) fn frames(&self) -> Vec<Vec<u8>> {
        let format = self.pieces[0].format;
        let mut frames: Vec<Option<Vec<u8>>> = vec![None; format.units() as usize];
        for piece in &self.pieces {
            assert_eq!(piece.format, format);
            let bytes = format.unit_bytes() as usize;
            assert!(piece.units().is_some_and(|units| units > 0));
            for (frame, data) in frames[piece.first as usize..]
                .iter_mut()
                .zip(piece.data.chunks_exact(bytes))
            {
                assert!(frame.is_none(), "a frame was delivered twice");
                *frame = Some(data.to_vec());
            }
        }
        let frames = frames.into_iter();
        frames.map(|frame| frame.expect("a delivered frame")).collect()
    }
}

impl Observer for Film {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        self.previews.push((width, height, rgb));
    }
    fn deliver(&mut self, piece: Piece) {
        self.pieces.push(piece);
    }
    fn cancelled(&self) -> bool {
        false
    }
}
