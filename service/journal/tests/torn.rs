//! The journal over a disk that fails at any write and loses its power: what was answered is there, and what was not is there as a whole
//! or not at all.

#![allow(clippy::unwrap_used)] // tests

use std::collections::BTreeMap;

use journal::simulated::Disk;
use journal::{Changes, Journal, JournalError, Table};
use proptest::prelude::*;

const JOBS: Table = Table("jobs");
#[derive(Clone, Debug)]
enum Op {
    /// Records with these keys get this value, in one transaction; an even value removes them.
    Write(Vec<u8>, u16),
    /// The disk fails after so many changes, until the power is cut.
    Fail(u32),
    Cut(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (prop::collection::vec(0u8..12, 1..4), any::<u16>()).prop_map(|(keys, value)| Op::Write(keys, value)),
        1 => (0u32..30).prop_map(Op::Fail),
        2 => any::<u64>().prop_map(Op::Cut),
    ]
}

fn records(journal: &Journal) -> BTreeMap<String, Vec<u16>> {
    journal.all(JOBS).unwrap().into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_answered_survives_a_power_cut_and_the_rest_is_whole_or_absent(
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let store = Disk::default();
        let mut journal = Some(Journal::open_in(store.backend()).unwrap());
        // What was answered, and what may be there besides, as its answer was an error.
        let mut known: BTreeMap<String, Vec<u16>> = BTreeMap::new();
        let mut possible: Vec<BTreeMap<String, Vec<u16>>> = Vec::new();
        for op in ops.into_iter().chain([Op::Cut(7)]) {
            match op {
                Op::Write(keys, value) => {
                    let mut changes = Changes::default();
                    let mut bases = possible.clone();
                    bases.push(known.clone());
                    for key in &keys {
                        let (key, large) = (key.to_string(), vec![value; 400]);
                        let is_put = value % 2 == 1;
                        changes = match is_put {
                            true => changes.put(JOBS, &key, &large).unwrap(),
                            false => changes.remove(JOBS, &key),
                        };
                        for base in &mut bases {
                            match is_put {
                                true => drop(base.insert(key.clone(), large.clone())),
                                false => drop(base.remove(&key)),
                            }
                        }
                    }
                    match journal.as_ref().unwrap().write(changes) {
                        Ok(()) => {
                            known = bases.pop().unwrap();
                            possible = bases;
                        }
                        Err(JournalError::Storage(_)) => possible.extend(bases),
                        Err(other) => panic!("{other}"),
                    }
                }
                Op::Fail(after) => store.fail_after(after),
                Op::Cut(fate) => {
                    // A process that is killed closes nothing: what its destructors write is lost too.
                    store.fail_after(0);
                    drop(journal.take());
                    store.cut(fate);
                    let again = Journal::open_in(store.backend()).unwrap();
                    let found = records(&again);
                    prop_assert!(
                        found == known || possible.contains(&found),
                        "{:?} of {:?}", found.keys(), known.keys()
                    );
                    (known, possible) = (found, Vec::new());
                    journal = Some(again);
                }
            }
        }
    }
}

#[test]
fn after_an_error_the_journal_is_opened_again() {
    let store = Disk::default();
    let journal = Journal::open_in(store.backend()).unwrap();
    let one = |value: u16| Changes::default().put(JOBS, "a", &vec![value]).unwrap();
    journal.write(one(1)).unwrap();
    store.fail_after(0);
    assert!(matches!(journal.write(one(2)), Err(JournalError::Storage(_))));
    store.works_again();
    journal.write(one(3)).unwrap();
    assert_eq!(records(&journal)["a"], [3]);
}

#[test]
fn a_journal_that_cannot_be_read_is_moved_aside_and_another_begins() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("journal.redb");
    let write = |journal: &Journal| {
        let changes = Changes::default().put(JOBS, "a", &vec![1_u16]).unwrap();
        journal.write(changes).unwrap();
    };
    write(&Journal::open(folder.path()).unwrap().journal);
    for damage in [
        b"no journal at all".to_vec(),
        vec![0; 4096],
        std::fs::read(&file).unwrap()[..700].to_vec(),
    ] {
        std::fs::write(&file, &damage).unwrap();
        let opened = Journal::open(folder.path()).unwrap();
        let aside = opened.damaged.unwrap();
        assert_eq!(std::fs::read(aside).unwrap(), damage, "nothing is deleted");
        assert_eq!(records(&opened.journal), BTreeMap::new());
        write(&opened.journal);
        drop(opened.journal);
        assert_eq!(records(&Journal::open(folder.path()).unwrap().journal).len(), 1);
    }
}

#[test]
fn one_service_has_the_journal_and_its_file_is_private() {
    use std::os::unix::fs::PermissionsExt as _;

    let folder = tempfile::tempdir().unwrap();
    let first = Journal::open(folder.path()).unwrap();
    let second = Journal::open(folder.path()).unwrap_err();
    assert!(matches!(second, JournalError::InUse(_)), "{second}");
    drop(first);
    Journal::open(folder.path()).unwrap();
    let mode = std::fs::metadata(folder.path().join("journal.redb"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_newer_journal_is_refused_and_left_as_it_is() {
    let store = Disk::default();
    drop(Journal::open_in(store.backend()).unwrap());
    let database = redb::Database::builder()
        .create_with_backend(store.clone())
        .unwrap();
    let transaction = database.begin_write().unwrap();
    let about: redb::TableDefinition<'_, &str, u32> = redb::TableDefinition::new("about");
    transaction
        .open_table(about)
        .unwrap()
        .insert("version", journal::VERSION + 1)
        .unwrap();
    transaction.commit().unwrap();
    drop(database);
    let refused = Journal::open_in(store.backend()).unwrap_err();
    assert!(
        matches!(refused, JournalError::Newer { found, .. } if found == journal::VERSION + 1),
        "{refused}"
    );
    let database = redb::Database::builder().create_with_backend(store).unwrap();
    let read = redb::ReadableDatabase::begin_read(&database).unwrap();
    let version = read
        .open_table(about)
        .unwrap()
        .get("version")
        .unwrap()
        .unwrap()
        .value();
    assert_eq!(version, journal::VERSION + 1);
}
