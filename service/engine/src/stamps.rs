//! Stamps of the files that a model was read from, which show whether it must be read again.

use std::path::{Path, PathBuf};

use gpu::FileStamp;
use model::{Model, ModelFile};

/// Most files of one folder that are checked: a folder with more is no folder of configurations.
const LISTED: usize = 256;

/// The files that an open model came from.
#[derive(Clone)]
pub(crate) struct Stamps {
    /// Files of each component, as they were when their headers were read.
    pub(crate) files: Vec<Vec<ModelFile>>,
    around: PathStamps,
}

/// Stamps at a model's path: of the path itself, of its children, and of their children, where configurations and
/// tokenizers are. A file that cannot be read has no stamp.
#[derive(Clone, PartialEq)]
pub(crate) struct PathStamps {
    path: PathBuf,
    stamps: Vec<(PathBuf, Option<FileStamp>)>,
}

impl PathStamps {
    /// The stamps now. They are taken before the model is read, so that a change meanwhile is detected later.
    pub(crate) fn of(path: &Path) -> PathStamps {
        let inside = listed(path);
        let below = inside.iter().flat_map(|child| listed(child));
        let all: Vec<PathBuf> = std::iter::once(path.to_owned())
            .chain(inside.iter().cloned())
            .chain(below)
            .collect();
        let stamped = all.into_iter().map(|path| {
            let stamp = FileStamp::at(&path).ok();
            (path, stamp)
        });
        PathStamps {
            path: path.to_owned(),
            stamps: stamped.collect(),
        }
    }
}

impl Stamps {
    /// The stamps of a model, whose path was stamped before the model was read.
    pub(crate) fn of(around: PathStamps, model: &dyn Model) -> Stamps {
        let components = model.components().iter();
        Stamps {
            files: components.map(|c| model.files_of(&c.name)).collect(),
            around,
        }
    }

    /// Whether the same files are there now.
    pub(crate) fn are_current(&self) -> bool {
        self.files.iter().flatten().all(ModelFile::is_current)
            && PathStamps::of(&self.around.path) == self.around
    }
}

/// The contents of a folder, in order; empty if it is no folder.
fn listed(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let entries = entries.take(LISTED).flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}
