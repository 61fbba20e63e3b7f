//! KEEPS. What must outlive the service: records by table and key, in one file. Changes that belong together are one transaction. A
//! transaction that was answered is there after a kill or a power cut, and one that was not is there as a whole or not at all.
//!
//! The file is one of `redb`, the values are MessagePack with the names of fields: a later version adds fields with
//! `#[serde(default)]`, and reads what an earlier one wrote.

pub mod simulated;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{
    Database, DatabaseError, ReadableDatabase as _, ReadableTable as _, StorageBackend, StorageError,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The version of what is written. It changes where an older service would misread it; a field more does not change it.
pub const VERSION: u32 = 1;
/// Name of the file in its folder.
const FILE: &str = "journal.redb";
/// Most bytes of the file in memory.
const CACHE_BYTES: usize = 16 << 20;
/// Where the version is.
const ABOUT: redb::TableDefinition<'static, &'static str, u32> = redb::TableDefinition::new("about");

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process has the file.
    #[error("{} is in use by another service: each needs a state folder of its own (service.state)", .0.display())]
    InUse(PathBuf),
    /// A newer version of moored wrote the file.
    #[error(
        "{} was written by a newer version of moored (its version is {found}, and this one reads up to {VERSION}): start that version, or \
         move the file away, and with it the jobs that are in it",
        .path.display()
    )]
    Newer { path: PathBuf, found: u32 },
    /// The file cannot be read or written.
    #[error("the journal cannot be used: {0}")]
    Storage(String),
    /// A record is not of the expected type.
    #[error("a record of the journal cannot be read or written: {0}")]
    Record(String),
}

/// Errors of the database, of each kind of its calls.
macro_rules! from_database {
    ($($error:ty),*) => {$(
        impl From<$error> for JournalError {
            fn from(error: $error) -> JournalError {
                JournalError::Storage(error.to_string())
            }
        }
    )*};
}

from_database!(
    redb::CommitError,
    redb::DatabaseError,
    redb::StorageError,
    redb::TableError,
    redb::TransactionError
);

/// A table of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table(pub &'static str);

impl Table {
    fn definition(self) -> redb::TableDefinition<'static, &'static str, &'static [u8]> {
        redb::TableDefinition::new(self.0)
    }
}

/// Changes that are made together or not at all.
#[derive(Debug, Default)]
pub struct Changes(Vec<(Table, String, Option<Vec<u8>>)>);

impl Changes {
    /// Writes a record, in place of one with the same key.
    ///
    /// # Errors
    /// [`JournalError::Record`] for a value that MessagePack cannot express.
    pub fn put(mut self, table: Table, key: &str, value: &impl Serialize) -> Result<Changes, JournalError> {
        let bytes =
            rmp_serde::to_vec_named(value).map_err(|problem| JournalError::Record(problem.to_string()))?;
        self.0.push((table, key.to_owned(), Some(bytes)));
        Ok(self)
    }

    /// Removes a record, if there is one.
    #[must_use]
    pub fn remove(mut self, table: Table, key: &str) -> Changes {
        self.0.push((table, key.to_owned(), None));
        self
    }
}

/// Makes what the database lies in: a file, or in tests a store that fails.
pub type Backend = Arc<dyn Fn() -> std::io::Result<Box<dyn StorageBackend>> + Send + Sync>;

enum Place {
    File(PathBuf),
    Backend(Backend),
}

/// The journal of one service. All calls wait for the disk.
pub struct Journal {
    place: Place,
    /// `None` after an error: it is opened again by the next call.
    open: Mutex<Option<Database>>,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Journal")
    }
}

/// A journal that was opened.
#[derive(Debug)]
pub struct Opened {
    pub journal: Journal,
    /// Where the file lies now that was there before and is damaged: the journal begins anew.
    pub damaged: Option<PathBuf>,
}

impl Journal {
    /// Opens the journal in a folder, or begins one. A file that was being written when the machine lost its power is repaired; one
    /// that cannot be is moved aside.
    ///
    /// # Errors
    /// When the file is in use, is of a newer version, or cannot be read or written.
    pub fn open(folder: &Path) -> Result<Opened, JournalError> {
        let path = folder.join(FILE);
        let place = Place::File(path.clone());
        let (database, damaged) = match place.open() {
            Ok(database) => (database, None),
            Err(Unopened::Damaged(problem)) => {
                let aside = aside_of(&path);
                tracing::error!(%problem, file = %path.display(), moved_to = %aside.display(), "the journal is damaged");
                fs::rename(&path, &aside).map_err(|problem| JournalError::Storage(problem.to_string()))?;
                (place.open().map_err(Unopened::into_error)?, Some(aside))
            }
            Err(other) => return Err(other.into_error()),
        };
        let journal = Journal {
            place,
            open: Mutex::new(Some(database)),
        };
        Ok(Opened { journal, damaged })
    }

    /// Opens a journal that lies elsewhere than in a file. For tests.
    ///
    /// # Errors
    /// As [`Journal::open`]; a damaged one is not moved aside.
    pub fn open_in(backend: Backend) -> Result<Journal, JournalError> {
        let place = Place::Backend(backend);
        let database = place.open().map_err(Unopened::into_error)?;
        Ok(Journal {
            place,
            open: Mutex::new(Some(database)),
        })
    }

    /// Makes changes. When this returns they are on the disk.
    ///
    /// # Errors
    /// [`JournalError::Storage`]; none of the changes may be there then, or all of them.
    pub fn write(&self, changes: Changes) -> Result<(), JournalError> {
        self.with(|database| {
            let transaction = database.begin_write()?;
            for (table, key, value) in &changes.0 {
                let mut table = transaction.open_table(table.definition())?;
                match value {
                    Some(bytes) => drop(table.insert(key.as_str(), bytes.as_slice())?),
                    None => drop(table.remove(key.as_str())?),
                }
            }
            Ok(transaction.commit()?)
        })
    }

    /// A record.
    ///
    /// # Errors
    /// [`JournalError::Storage`], and [`JournalError::Record`] for one of another type.
    pub fn get<T: DeserializeOwned>(&self, table: Table, key: &str) -> Result<Option<T>, JournalError> {
        let bytes = self.with(|database| {
            let table = match database.begin_read()?.open_table(table.definition()) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
                Err(problem) => return Err(problem.into()),
            };
            Ok(table.get(key)?.map(|bytes| bytes.value().to_vec()))
        })?;
        bytes.map(|bytes| read(&bytes)).transpose()
    }

    /// Every record of a table, by key. One that cannot be read is left out, with a line in the log: it must not take the others away.
    ///
    /// # Errors
    /// [`JournalError::Storage`].
    pub fn all<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<(String, T)>, JournalError> {
        self.with(|database| {
            let opened = match database.begin_read()?.open_table(table.definition()) {
                Ok(opened) => opened,
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                Err(problem) => return Err(problem.into()),
            };
            let mut records = Vec::new();
            for record in opened.iter()? {
                let (key, bytes) = record?;
                match read(bytes.value()) {
                    Ok(value) => records.push((key.value().to_owned(), value)),
                    Err(problem) => {
                        tracing::warn!(table = table.0, key = key.value(), %problem, "a record of the journal is left out");
                    }
                }
            }
            Ok(records)
        })
    }

    /// Carries something out on the database. After an error the database refuses everything: it is opened again by the next call.
    fn with<T>(&self, act: impl FnOnce(&Database) -> Result<T, JournalError>) -> Result<T, JournalError> {
        let mut open = self.lock();
        let database = match open.take() {
            Some(database) => database,
            None => self.place.open().map_err(Unopened::into_error)?,
        };
        let done = act(&database);
        if !matches!(done, Err(JournalError::Storage(_))) {
            *open = Some(database);
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, Option<Database>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a database was not opened.
enum Unopened {
    Damaged(String),
    Other(JournalError),
}

impl Unopened {
    fn into_error(self) -> JournalError {
        match self {
            Unopened::Damaged(problem) => JournalError::Storage(problem),
            Unopened::Other(error) => error,
        }
    }
}

impl From<JournalError> for Unopened {
    fn from(error: JournalError) -> Unopened {
        Unopened::Other(error)
    }
}

impl Place {
    fn open(&self) -> Result<Database, Unopened> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES);
        let opened = match self {
            Place::File(path) => {
                let file = gpu::open_private(path)
                    .map_err(|problem| JournalError::Storage(format!("{}: {problem}", path.display())))?;
                drop(file);
                builder.create(path)
            }
            Place::Backend(backend) => {
                let backend = backend().map_err(|problem| JournalError::Storage(problem.to_string()))?;
                builder.create_with_backend(Boxed(backend))
            }
        };
        let database = match opened {
            Ok(database) => database,
            Err(DatabaseError::DatabaseAlreadyOpen) => {
                return Err(JournalError::InUse(self.path()).into());
            }
            Err(DatabaseError::Storage(StorageError::Corrupted(problem))) => {
                return Err(Unopened::Damaged(problem));
            }
            Err(DatabaseError::Storage(StorageError::Io(problem)))
                if matches!(
                    problem.kind(),
                    std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof
                ) =>
            {
                return Err(Unopened::Damaged(problem.to_string()));
            }
            Err(other) => return Err(JournalError::from(other).into()),
        };
        self.check_version(&database)?;
        Ok(database)
    }

    /// Refuses the file of a newer version, and writes the version into a new one.
    fn check_version(&self, database: &Database) -> Result<(), JournalError> {
        let found = match database.begin_read()?.open_table(ABOUT) {
            Ok(about) => about.get("version")?.map(|version| version.value()),
            Err(redb::TableError::TableDoesNotExist(_)) => None,
            Err(problem) => return Err(problem.into()),
        };
        match found {
            Some(found) if found > VERSION => Err(JournalError::Newer {
                path: self.path(),
                found,
            }),
            Some(VERSION) => Ok(()),
            _ => {
                let transaction = database.begin_write()?;
                drop(transaction.open_table(ABOUT)?.insert("version", VERSION)?);
                Ok(transaction.commit()?)
            }
        }
    }

    fn path(&self) -> PathBuf {
        match self {
            Place::File(path) => path.clone(),
            Place::Backend(_) => PathBuf::from(FILE),
        }
    }
}

/// A name beside a damaged file that nothing has.
fn aside_of(path: &Path) -> PathBuf {
    let named = |number: u32| path.with_extension(format!("damaged-{number}"));
    let mut free = (1..).map(named).filter(|aside| !aside.exists());
    free.next().unwrap_or_else(|| named(0))
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JournalError> {
    rmp_serde::from_slice(bytes).map_err(|problem| JournalError::Record(problem.to_string()))
}

/// A backend of any type.
#[derive(Debug)]
struct Boxed(Box<dyn StorageBackend>);

impl StorageBackend for Boxed {
    fn len(&self) -> std::io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.0.write(offset, data)
    }
}
