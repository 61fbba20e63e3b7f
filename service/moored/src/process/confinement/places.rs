//! The places that a worker may read: the configured folders of models, and models that are links in them to somewhere else.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use calls::Models;
use engine::messages::{Command, ModelLocation};
use tokio::time::Instant;

/// How long a folder may take to answer. One that takes longer, as on a disk of the network that is away, is left out: else it would
/// keep the worker from starting.
const ANSWER: Duration = Duration::from_secs(2);

/// How long it is believed that a worker may read a model.
const BELIEVED: Duration = Duration::from_secs(10);

/// Folders within a model in which links are looked for: components, and their files.
const DEPTH_OF_LINKS: usize = 2;

/// What distinguishes a folder from another one at the same path: a disk that was mounted over it.
type Identity = (u64, u64);

/// What workers of one card may read.
pub(crate) struct Places {
    models: Arc<Models>,
    /// Folders beside those of models.
    beside: Vec<PathBuf>,
    /// What no worker may read, without links.
    never: Vec<PathBuf>,
    /// What a worker was started for already.
    asked: HashSet<(PathBuf, Identity)>,
    /// Models outside of the configured folders that links in these lead to, as orders named them.
    outside: BTreeSet<PathBuf>,
    /// What the worker of now may read, without links.
    granted: Vec<(PathBuf, Identity)>,
    /// Models that it may read, and when that was looked at.
    believed: HashMap<ModelLocation, Instant>,
}

impl Places {
    pub(crate) fn new(models: Arc<Models>, beside: Vec<PathBuf>, never: Vec<PathBuf>) -> Places {
        Places {
            models,
            beside,
            never,
            asked: HashSet::new(),
            outside: BTreeSet::new(),
            granted: Vec::new(),
            believed: HashMap::new(),
        }
    }

    /// The places that a new worker may read: those that are there and answer.
    pub(crate) async fn grant(&mut self) -> Vec<PathBuf> {
        self.believed.clear();
        let models = self.models.clone();
        let of_models = within_time(move || models.places()).await.unwrap_or_default();
        let never = self.never.clone();
        let links = within_each(of_models.clone(), move |folder| linked_models(folder, &never)).await;
        let all: BTreeSet<PathBuf> = of_models
            .into_iter()
            .chain(links.into_iter().flatten())
            .chain(self.beside.clone())
            .chain(self.outside.clone())
            .collect();
        let found = within_each(all, place_at).await;
        self.granted = found.into_iter().flatten().collect();
        self.granted.iter().map(|(place, _)| place.clone()).collect()
    }

    /// Remembers where the model of a command is, if the worker of now may not read it; a worker that is started next may. True if that
    /// is so: the model is a link that leads out of the configured folders, or its folder was made or mounted later.
    pub(crate) async fn lacks(&mut self, command: &Command) -> bool {
        let Command::Run(order) = command else {
            return false;
        };
        if self
            .believed
            .get(&order.model)
            .is_some_and(|since| since.elapsed() < BELIEVED)
        {
            return false;
        }
        let (model, granted, never) = (order.model.clone(), self.granted.clone(), self.never.clone());
        let look = move || Look::at(&model, &granted, &never);
        let mut look = within_time(look).await.unwrap_or_default();
        let key = &order.model.key;
        if !look.lead_out.is_empty() && !self.believed.contains_key(&order.model) {
            tracing::warn!(links_to = ?look.lead_out, model = key,
                "links in a model lead out of the folders of models, where its worker may not read: name these folders in models.folders");
        }
        // A worker was started for these already, and may not read them all the same.
        look.locations.retain(|location| !self.asked.contains(location));
        if look.locations.is_empty() {
            self.believed.insert(order.model.clone(), Instant::now());
            return false;
        }
        let places: Vec<&PathBuf> = look.locations.iter().map(|(place, _)| place).collect();
        tracing::info!(
            ?places,
            model = key,
            "the worker may not read these yet, and is started again so that it may"
        );
        self.asked.extend(look.locations);
        self.outside.extend(look.outside);
        true
    }
}

/// How deep a folder of models is looked through for links to models: `owner/name`.
const DEPTH_OF_MODELS: usize = 2;
/// Files of which a model's folder has one.
const OF_MODELS: [&str; 3] = ["model_index.json", "config.json", "moored.json"];
/// Most links of a folder.
const MOST_LINKS: usize = 1_000;

/// What a path leads to, and its identity; `None` where there is nothing.
fn place_at(path: &Path) -> Option<(PathBuf, Identity)> {
    let path = path.canonicalize().ok()?;
    let facts = fs::metadata(&path).ok()?;
    Some((path, (facts.dev(), facts.ino())))
}

/// Where a model is that a worker may not read.
#[derive(Debug, Default)]
struct Look {
    /// What the paths of the model and its adapters lead to, and the folders that these files are named in.
    locations: HashSet<(PathBuf, Identity)>,
    /// What a worker has to be granted for them beside the configured folders.
    outside: BTreeSet<PathBuf>,
    /// What links within the model lead to.
    lead_out: BTreeSet<PathBuf>,
}

/// Extension of the file beside a model that says more of it.
const SIDECAR: &str = "moored.json";

impl Look {
    fn at(model: &ModelLocation, granted: &[(PathBuf, Identity)], never: &[PathBuf]) -> Look {
        let there: Vec<&Path> = granted
            .iter()
            .filter(|(place, identity)| place_at(place).is_some_and(|(_, now)| now == *identity))
            .map(|(place, _)| place.as_path())
            .collect();
        let is_granted = |target: &Path| there.iter().any(|place| target.starts_with(place));
        let adapters = model.adapters.iter().map(|adapter| &adapter.path);
        let copies = model.kept.iter().map(|(_, copy)| copy);
        let sidecar = Some(model.path.with_extension(SIDECAR)).filter(|sidecar| sidecar.exists());
        let mut look = Look::default();
        for path in std::iter::once(&model.path)
            .chain(&sidecar)
            .chain(adapters)
            .chain(copies)
        {
            let folder = path.parent().filter(|_| !path.is_dir());
            let ends = std::iter::once(path.as_path()).chain(folder);
            let missing = ends.filter_map(place_at).filter(|(place, _)| !is_granted(place));
            let before = look.locations.len();
            look.locations.extend(missing);
            if look.locations.len() > before {
                look.outside.extend(outside_of(path));
            }
        }
        look.outside
            .retain(|place| !is_granted(place) && !never.iter().any(|never| place.starts_with(never)));
        // Whoever made a model may have made the links in it, to files that are none of a model's.
        targets_of_links(&model.path, DEPTH_OF_LINKS, &mut look.lead_out);
        let outside = &look.outside;
        look.lead_out
            .retain(|target| !is_granted(target) && !outside.iter().any(|place| target.starts_with(place)));
        look
    }
}

/// The place that a model's path leads to. A link has to lead to a file of its own kind, or to a folder. Of a hub's cache it is the
/// folder of all revisions, since their files are links to it.
fn outside_of(path: &Path) -> Option<PathBuf> {
    let target = path.canonicalize().ok()?;
    let folder = match target.is_dir() {
        true => target.clone(),
        false => path.parent()?.canonicalize().ok()?,
    };
    if let Some(revisions) = folder.parent().filter(|folder| folder.ends_with("snapshots")) {
        return revisions.parent().map(Path::to_owned);
    }
    (target.is_dir() || target.extension() == path.extension()).then_some(target)
}

/// Where the links below a folder lead.
fn targets_of_links(folder: &Path, depth: usize, targets: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_symlink() {
            targets.extend(entry.path().canonicalize());
        } else if kind.is_dir() && depth > 1 {
            targets_of_links(&entry.path(), depth - 1, targets);
        }
    }
}

/// What the links in a folder of models lead to: models that a model of the folder may take parts of, or that orders name later.
fn linked_models(folder: &Path, never: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_owned(), DEPTH_OF_MODELS)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_symlink() {
                found.extend(outside_of(&entry.path()).filter(|place| is_model(place)));
            } else if kind.is_dir() && depth > 1 {
                folders.push((entry.path(), depth - 1));
            }
            if found.len() >= MOST_LINKS {
                return found;
            }
        }
    }
    found.retain(|place| {
        !never
            .iter()
            .any(|never| place.starts_with(never) || never.starts_with(place))
    });
    found
}

/// Whether it is a file, which has the kind of a model, or a folder with one of the files that say what a model is.
fn is_model(place: &Path) -> bool {
    place.is_file()
        || OF_MODELS.iter().any(|name| place.join(name).exists())
        || place.join("snapshots").is_dir()
}

/// The results of work at each place: one that does not answer hides no others.
async fn within_each<T: Send + 'static>(
    places: impl IntoIterator<Item = PathBuf>,
    work: impl Fn(&Path) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let each = places.into_iter().map(|place| {
        let work = work.clone();
        within_time(move || work(&place))
    });
    futures::future::join_all(each)
        .await
        .into_iter()
        .flatten()
        .collect()
}

/// The result of work that may wait for a disk; `None` if it takes longer than [`ANSWER`].
async fn within_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::time::timeout(ANSWER, tokio::task::spawn_blocking(work))
        .await
        .ok()?
        .ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn model_at(path: PathBuf) -> ModelLocation {
        ModelLocation {
            key: "mine".to_owned(),
            path,
            quantization: model::Quantization::default(),
            adapters: Vec::new(),
            kept: Vec::new(),
            identities: Vec::new(),
        }
    }

    fn granted(paths: &[PathBuf]) -> Vec<(PathBuf, Identity)> {
        paths.iter().flat_map(|path| place_at(path)).collect()
    }

    #[test]
    fn a_model_that_is_a_link_is_missing_until_it_is_granted() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in [
            "models",
            "elsewhere/mine",
            "hub/models--a--b/snapshots/1",
            "hub/models--a--b/blobs",
        ] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        for name in [
            "elsewhere/a.safetensors",
            "elsewhere/key",
            "models/b.gguf",
            "hub/models--a--b/blobs/1f",
        ] {
            fs::write(root.join(name), "x").unwrap();
        }
        let link = |to: &str, at: &str| symlink(root.join(to), root.join(at)).unwrap();
        link("elsewhere/mine", "models/mine");
        link("elsewhere/a.safetensors", "models/a.safetensors");
        link("elsewhere/key", "models/key.safetensors");
        fs::write(root.join("elsewhere/a.moored.json"), "{}").unwrap();
        link("elsewhere/a.moored.json", "models/a.moored.json");
        link("hub/models--a--b/blobs/1f", "hub/models--a--b/snapshots/1/c.gguf");
        let models = granted(&[root.join("models")]);
        let look = |path: &str, granted: &[_], never: &[PathBuf]| {
            Look::at(&model_at(root.join(path)), granted, never)
        };
        let outside = |path: &str, never: &[PathBuf]| Vec::from_iter(look(path, &models, never).outside);
        let mine = root.join("elsewhere/mine");
        assert_eq!(outside("models/mine", &[]), std::slice::from_ref(&mine));
        assert!(
            look("models/mine", &granted(std::slice::from_ref(&mine)), &[])
                .locations
                .is_empty()
        );
        assert!(
            outside("models/mine", &[root.join("elsewhere")]).is_empty(),
            "a secret"
        );
        assert_eq!(
            outside("models/a.safetensors", &[]),
            [
                root.join("elsewhere/a.moored.json"),
                root.join("elsewhere/a.safetensors")
            ]
        );
        assert!(
            outside("models/key.safetensors", &[]).is_empty(),
            "it is no model"
        );
        assert!(look("models/b.gguf", &models, &[]).locations.is_empty());
        // The hub's cache may have been made after the worker was started.
        for path in [
            "hub/models--a--b/snapshots/1",
            "hub/models--a--b/snapshots/1/c.gguf",
        ] {
            assert_eq!(outside(path, &[]), [root.join("hub/models--a--b")], "{path}");
            assert!(!look(path, &models, &[]).locations.is_empty(), "{path}");
        }
        // A disk that is mounted over the folder is another one than the worker may read.
        let other = granted(std::slice::from_ref(&mine))
            .into_iter()
            .map(|(at, (device, inode))| (at, (device, inode + 1)));
        assert!(
            !look("models/mine", &Vec::from_iter(other), &[])
                .locations
                .is_empty()
        );
    }

    #[test]
    fn models_that_are_links_are_granted_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["models/owner", "elsewhere/base", "elsewhere/notes", "secret"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        for name in [
            "elsewhere/base/model_index.json",
            "elsewhere/a.safetensors",
            "secret/config.json",
        ] {
            fs::write(root.join(name), "x").unwrap();
        }
        for (to, at) in [
            ("elsewhere/base", "models/owner/base"),
            ("elsewhere/a.safetensors", "models/a.safetensors"),
            ("elsewhere/notes", "models/notes"),
            ("elsewhere/gone", "models/gone"),
            ("secret", "models/secret"),
        ] {
            symlink(root.join(to), root.join(at)).unwrap();
        }
        let mut found = linked_models(&root.join("models"), &[root.join("secret/token")]);
        found.sort();
        assert_eq!(
            found,
            [root.join("elsewhere/a.safetensors"), root.join("elsewhere/base")]
        );
    }

    #[test]
    fn links_within_a_model_are_told_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["models/mine/vae", "models/mine/transformer", "elsewhere"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        fs::write(root.join("elsewhere/weights"), "x").unwrap();
        symlink(
            root.join("elsewhere/weights"),
            root.join("models/mine/vae/weights"),
        )
        .unwrap();
        symlink("../vae", root.join("models/mine/transformer/other")).unwrap();
        let look = Look::at(
            &model_at(root.join("models/mine")),
            &granted(&[root.join("models")]),
            &[],
        );
        assert!(look.locations.is_empty(), "{look:?}");
        assert_eq!(Vec::from_iter(look.lead_out), [root.join("elsewhere/weights")]);
    }
}
