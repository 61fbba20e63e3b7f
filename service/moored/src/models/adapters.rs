//! The adapters that requests can name: files and folders of peft in the configured folders, repositories of the hub cache,
//! and what ships with the project.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::Error;
use engine::library::Entry;
use pipelines::{
    AdapterFile, AdapterUse, StrengthCurve, adapter_stem, is_adapter_folder, is_control_net_folder,
};

use super::{Models, children, hub_model, invalid, is_pipeline, shipped_folder};
use crate::hub;
use crate::proto::v1;

/// Most adapters of one request.
const MOST_ADAPTERS: usize = 16;

/// Prefix of the ids of adapters that ship with the project.
const SHIPPED: &str = "moored/";

/// Depth of folders that are looked through.
const DEPTH: usize = 3;

/// An adapter that can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundAdapter {
    pub(crate) id: String,
    /// A file, or a folder of peft.
    pub(crate) path: PathBuf,
}

impl FoundAdapter {
    /// Whether it is a ControlNet, rather than a LoRA.
    fn is_control_net(&self) -> bool {
        is_control_net_folder(&self.path)
    }

    /// Public name of its kind.
    pub(crate) fn kind(&self) -> &'static str {
        match self.is_control_net() {
            true => "controlnet",
            false => "lora",
        }
    }

    /// Bytes of its file, or of the files in its folder.
    pub(crate) fn bytes(&self) -> u64 {
        let length = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
        match self.path.is_dir() {
            true => children(&self.path).iter().map(|path| length(path)).sum(),
            false => length(&self.path),
        }
    }
}

impl Models {
    /// Every adapter, by id; of several with one id, the first that was found. Scans folders when the listing is too old.
    pub(crate) fn adapters(&self) -> Arc<Vec<FoundAdapter>> {
        self.adapter_listing.current(|| self.scan_adapters())
    }

    /// Scans the folders for adapters, however recent the listing.
    pub(crate) fn rescan_adapters(&self) -> Arc<Vec<FoundAdapter>> {
        self.adapter_listing.rescan(|| self.scan_adapters())
    }

    /// The adapters with these among them, if they are there now: what the listing lacks, or what is gone, is looked for.
    fn adapters_with<'a>(&self, asked: impl Iterator<Item = &'a str>) -> Arc<Vec<FoundAdapter>> {
        let there = self.adapters();
        let mut found = asked.map(|asked| find(&there, asked));
        match found.all(|found| found.is_some_and(|found| found.path.exists())) {
            true => there,
            false => self.rescan_adapters(),
        }
    }

    /// The name of the adapter that a request calls so, as far as it is known.
    pub(crate) fn adapter_name(&self, asked: &str) -> Option<String> {
        let known = self.adapter_listing.known(|| self.scan_adapters());
        find(&known, asked).map(|found| found.id.clone())
    }

    fn scan_adapters(&self) -> Vec<FoundAdapter> {
        let mut found = Vec::new();
        for folder in &self.settings.adapters {
            scan(folder, "", DEPTH, &mut found);
        }
        for repository in children(&self.hub_cache) {
            let name = repository.file_name().and_then(|name| name.to_str());
            if let Some(id) = name.and_then(|name| name.strip_prefix("models--")) {
                let holds_transformer = |file: &Path| self.holds_transformer(file);
                found.extend(of_hub(
                    &repository,
                    &id.replacen("--", "/", 1),
                    &holds_transformer,
                ));
            }
        }
        if let Some(folder) = shipped_folder("demo/adapters") {
            scan(&folder, SHIPPED, 1, &mut found);
        }
        let mut listed: Vec<FoundAdapter> = Vec::new();
        for adapter in found {
            if !listed.iter().any(|other| other.id == adapter.id) {
                listed.push(adapter);
            }
        }
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        listed
    }

    /// The entry with the adapters that a reference names, without those of strength 0. ControlNets are taken from a key
    /// (`from_key`), where reports name them, and refused elsewhere.
    pub(super) fn with_adapters(
        &self,
        entry: Entry,
        asked: &[v1::Adapter],
        from_key: bool,
    ) -> Result<Entry, Error> {
        if asked.is_empty() {
            return Ok(entry);
        }
        if asked.len() > MOST_ADAPTERS {
            let problem = format!("has {} adapters; {MOST_ADAPTERS} are the most", asked.len());
            return Err(invalid("model.adapters", problem));
        }
        let there = self.adapters_with(asked.iter().map(|asked| asked.id.as_str()));
        let mut files: Vec<AdapterFile> = Vec::new();
        for (index, asked) in asked.iter().enumerate() {
            let field = |name: &str| format!("model.adapters[{index}].{name}");
            let found = find(&there, &asked.id);
            let found = found.ok_or_else(|| invalid(&field("id"), not_found(&asked.id, &there)))?;
            if found.is_control_net() && !from_key {
                let problem = format!(
                    "{:?} is a ControlNet: name it in controls, with its picture",
                    found.id
                );
                return Err(invalid(&field("id"), problem));
            }
            if files.iter().any(|file| file.name == found.id) {
                let problem = format!("{:?} is named twice; give it one strength", found.id);
                return Err(invalid(&field("id"), problem));
            }
            if is_active(&use_of(asked, index)?) {
                files.push(AdapterFile {
                    name: found.id.clone(),
                    path: found.path.clone(),
                    ignores_unknown: asked.ignore_unknown,
                });
            }
        }
        Ok(match files.is_empty() {
            true => entry,
            false => entry.with_adapters(files),
        })
    }

    /// The entry with these ControlNets behind its adapters, each once.
    pub(crate) fn with_control_nets(&self, entry: &Entry, ids: &[String]) -> Result<Entry, Error> {
        let there = self.adapters_with(ids.iter().map(String::as_str));
        let mut files = entry.adapters.clone();
        for (index, id) in ids.iter().enumerate() {
            let found = find(&there, id);
            let field = format!("controls[{index}].id");
            let found = found.ok_or_else(|| invalid(&field, not_found(id, &there)))?;
            if !found.is_control_net() {
                let problem = format!(
                    "{:?} is no ControlNet; a LoRA is named in model.adapters",
                    found.id
                );
                return Err(invalid(&field, problem));
            }
            if !files.iter().any(|file| file.name == found.id) {
                files.push(AdapterFile {
                    name: found.id.clone(),
                    path: found.path.clone(),
                    ignores_unknown: false,
                });
            }
        }
        Ok(entry.with_adapters(files))
    }

    /// The name of an adapter of an entry, which a request may call by its file.
    pub(crate) fn name_in(entry: &Entry, id: &str) -> String {
        let there = entry.adapters.iter().map(|file| FoundAdapter {
            id: file.name.clone(),
            path: file.path.clone(),
        });
        find(&there.collect::<Vec<_>>(), id).map_or_else(|| id.to_owned(), |found| found.id.clone())
    }

    /// How a request uses the adapters that its reference names and its entry has.
    pub(crate) fn uses_of(entry: &Entry, asked: &[v1::Adapter]) -> Result<Vec<AdapterUse>, Error> {
        let uses = asked.iter().enumerate();
        let uses = uses
            .map(|(index, asked)| use_of(asked, index))
            .collect::<Result<Vec<_>, _>>()?;
        // Those of strength 0 were left out of the entry; the others are in it in the same order.
        let active = uses.into_iter().filter(is_active);
        let named = entry.adapters.iter().zip(active);
        let loras = named.filter(|(file, _)| !is_control_net_folder(&file.path));
        let uses = loras.map(|(file, each)| AdapterUse {
            name: file.name.clone(),
            ..each
        });
        Ok(uses.collect())
    }
}

/// An adapter by its id, with or without its ending, or by the path of its file.
fn find<'a>(there: &'a [FoundAdapter], asked: &str) -> Option<&'a FoundAdapter> {
    let name = adapter_stem(asked).unwrap_or(asked);
    let path = Path::new(asked);
    let is_it = |adapter: &&FoundAdapter| {
        adapter.id == name
            || (path.is_absolute() && std::fs::canonicalize(&adapter.path).is_ok_and(|own| own == path))
    };
    there.iter().find(is_it)
}

/// Whether adapters are just those that a reference names, in order.
pub(super) fn are_named(adapters: &[AdapterFile], asked: &[v1::Adapter]) -> bool {
    let name = |asked: &v1::Adapter| adapter_stem(&asked.id).unwrap_or(&asked.id).to_owned();
    let names = adapters.iter().map(|file| file.name.clone());
    names.eq(asked.iter().map(name))
}

/// Whether an adapter changes anything.
fn is_active(each: &AdapterUse) -> bool {
    !each.strength.is_zero() || each.text_strength != 0.0
}

fn use_of(asked: &v1::Adapter, index: usize) -> Result<AdapterUse, Error> {
    let field = |name: &str| format!("model.adapters[{index}].{name}");
    let strength = match (asked.curve.as_slice(), asked.strength) {
        ([], strength) => StrengthCurve::constant(strength.unwrap_or(1.0))
            .map_err(|error| invalid(&field("strength"), error.to_string()))?,
        (_, Some(_)) => {
            let problem = "excludes a strength for all steps: leave one out".to_owned();
            return Err(invalid(&field("curve"), problem));
        }
        (points, None) => {
            let points = points.iter().map(|point| (point.position, point.strength));
            StrengthCurve::of(points.collect())
                .map_err(|error| invalid(&field("curve"), error.to_string()))?
        }
    };
    let text_strength = asked.text_strength.unwrap_or_else(|| strength.first());
    StrengthCurve::constant(text_strength)
        .map_err(|error| invalid(&field("text_strength"), error.to_string()))?;
    Ok(AdapterUse {
        name: asked.id.clone(),
        strength,
        text_strength,
    })
}

fn not_found(id: &str, there: &[FoundAdapter]) -> String {
    match there {
        [] => format!(
            "{id:?} is not there, and no other adapter: set models.adapters to the folders that they are in"
        ),
        _ => format!("{id:?} is not there; `moored models --adapters` lists them"),
    }
}

/// Adapters in a folder and the folders in it: files, and folders of peft. Ids are paths without the ending.
fn scan(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<FoundAdapter>) {
    for child in children(folder) {
        let Some(name) = child.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if name.starts_with('.') {
            continue;
        }
        if is_adapter_folder(&child) || is_control_net_folder(&child) {
            found.push(FoundAdapter {
                id: format!("{prefix}{name}"),
                path: child,
            });
        } else if child.is_dir() {
            if depth > 1 {
                scan(&child, &format!("{prefix}{name}/"), depth - 1, found);
            }
        } else if let Some(stem) = adapter_stem(name) {
            found.push(FoundAdapter {
                id: format!("{prefix}{stem}"),
                path: child,
            });
        }
    }
}

/// The adapters of a repository in a hub cache: of the revision of `main`, or the newest. A repository with a pipeline, or a
/// model of another kind, has none; nor are transformers and shards adapters. The only file goes by the repository's name,
/// several by that and theirs.
fn of_hub(repository: &Path, id: &str, holds_transformer: &dyn Fn(&Path) -> bool) -> Vec<FoundAdapter> {
    let Some(snapshot) = hub_model(repository, id).into_iter().next() else {
        return Vec::new();
    };
    if is_pipeline(&snapshot.path) {
        return Vec::new();
    }
    if is_adapter_folder(&snapshot.path) || is_control_net_folder(&snapshot.path) {
        return vec![FoundAdapter {
            id: id.to_owned(),
            path: snapshot.path,
        }];
    }
    if snapshot.path.join("config.json").is_file() {
        return Vec::new();
    }
    let mut files = Vec::new();
    scan(&snapshot.path, "", DEPTH, &mut files);
    files.retain(|adapter| {
        let is_file = !adapter.path.is_dir();
        !(is_file && (hub::is_shard(&adapter.path) || holds_transformer(&adapter.path)))
    });
    match &mut files[..] {
        [only] => only.id = id.to_owned(),
        several => several
            .iter_mut()
            .for_each(|adapter| adapter.id = format!("{id}/{}", adapter.id)),
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelSettings;
    use crate::models::tests::folder_with;

    fn models(folder: &Path) -> Models {
        let settings = ModelSettings {
            adapters: vec![folder.to_owned()],
            ..ModelSettings::default()
        };
        Models::new(settings, folder.join("no-hub-cache"))
    }

    fn adapter(id: &str, strength: Option<f32>) -> v1::Adapter {
        v1::Adapter {
            id: id.to_owned(),
            strength,
            ..Default::default()
        }
    }

    fn base() -> Entry {
        let quantization = pipelines::Quantization::NONE;
        Entry::new("base".to_owned(), String::new(), "/base".into(), quantization)
    }

    #[test]
    fn files_and_folders_of_peft_are_found_by_their_paths() {
        let folder = folder_with(&[
            "ink.safetensors",
            "styles/oil.safetensors",
            "styles/old/wax.safetensors",
            "a/b/c/too-deep.safetensors",
            "peft/adapter_model.safetensors",
            "peft/adapter_config.json",
            "notes.txt",
            ".hidden.safetensors",
        ]);
        let models = models(folder.path());
        assert_eq!(own_ids(&models), ["ink", "peft", "styles/oil", "styles/old/wax"]);
    }

    /// Ids of the adapters that are listed, without those that ship with the project.
    fn own_ids(models: &Models) -> Vec<String> {
        let listed = models.adapters();
        let ids = listed.iter().map(|adapter| adapter.id.clone());
        ids.filter(|id| !id.starts_with(SHIPPED)).collect()
    }

    #[test]
    fn a_missing_or_deleted_adapter_triggers_a_new_scan() {
        let folder = folder_with(&["ink.safetensors"]);
        let models = models(folder.path());
        let named = |id: &str| models.with_adapters(base(), &[adapter(id, None)], false);
        assert!(named("ink").is_ok());
        std::fs::write(folder.path().join("oil.safetensors"), "{}").unwrap();
        assert!(named("ink").is_ok());
        assert_eq!(own_ids(&models), ["ink"], "nothing was scanned for what is there");
        assert!(named("oil").is_ok());
        assert_eq!(own_ids(&models), ["ink", "oil"]);
        std::fs::remove_file(folder.path().join("ink.safetensors")).unwrap();
        assert!(matches!(named("ink"), Err(Error::Invalid(_))));
        assert_eq!(own_ids(&models), ["oil"]);
        // A folder that does not answer keeps nobody from what is known.
        let _blocked = models.adapter_listing.block().unwrap();
        assert!(named("oil").is_ok());
    }

    #[test]
    fn the_key_includes_adapters_except_those_of_strength_0() {
        let folder = folder_with(&["ink.safetensors", "styles/oil.safetensors"]);
        let models = models(folder.path());
        let key = |asked: &[v1::Adapter]| models.with_adapters(base(), asked, false).unwrap().key;
        assert_eq!(key(&[]), "base+full");
        assert_eq!(
            key(&[adapter("styles/oil.safetensors", None), adapter("ink", Some(0.5))]),
            "base+full&styles/oil&ink"
        );
        assert_eq!(key(&[adapter("ink", Some(0.0))]), "base+full");
        let entry = models
            .with_adapters(base(), &[adapter("ink", None)], false)
            .unwrap();
        assert_eq!(entry.base_key(), "base+full");
    }

    #[test]
    fn an_adapter_that_cannot_be_used_is_refused_by_its_field() {
        let folder = folder_with(&["ink.safetensors"]);
        let models = models(folder.path());
        let refused = |asked: &[v1::Adapter]| match models.with_adapters(base(), asked, false) {
            Err(Error::Invalid(problems)) => problems[0].field.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[adapter("oil", None)]), "model.adapters[0].id");
        assert_eq!(refused(&[adapter("../ink", None)]), "model.adapters[0].id");
        let twice = [adapter("ink", None), adapter("ink", Some(2.0))];
        assert_eq!(refused(&twice), "model.adapters[1].id");
        assert_eq!(
            refused(&[adapter("ink", Some(f32::NAN))]),
            "model.adapters[0].strength"
        );
        let curved = v1::Adapter {
            curve: vec![v1::StrengthPoint {
                position: 2.0,
                strength: 1.0,
            }],
            ..adapter("ink", None)
        };
        assert_eq!(refused(&[curved]), "model.adapters[0].curve");
        let many = vec![adapter("ink", None); MOST_ADAPTERS + 1];
        assert_eq!(refused(&many), "model.adapters");
    }
}
