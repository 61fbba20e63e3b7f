//! READS AND WRITES. Pictures, films and tracks as files, with the recipe of the result. It knows no client and no queue.

mod cancel;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod encoded;
pub mod films;
pub mod panics;
pub mod pictures;
mod recipe;
mod stored;
pub mod tracks;

pub use cancel::{CancelOnDrop, CancelToken, Cancelled};
pub use encoded::{EncodedFile, FilePosition};
pub use recipe::{MadeWith, Recipe, RecipeAdapter, sampler_of};
pub use stored::recipe_of;
