//! The shapes for which the walk through half an autoencoder uses cuDNN.

use ops::Planned;

use super::attention::attention_shape;
use super::scratch::{Account, PlannedLayer};

impl Account {
    /// Adds the shapes of the layers that were passed, in order of use, each once.
    pub(super) fn planned(&self, all: &mut Vec<Planned>) {
        let mut add = |shape: Planned| {
            if !all.contains(&shape) {
                all.push(shape);
            }
        };
        for seen in &self.seen {
            match seen {
                PlannedLayer::Convolution(pass, rows) => pass.planned(*rows, self.dtype).for_each(&mut add),
                PlannedLayer::Attention(map) => (0..map.sides[1])
                    .map(|frame| Planned::Attention(attention_shape(*map, frame, self.dtype)))
                    .for_each(&mut add),
            }
        }
    }
}
