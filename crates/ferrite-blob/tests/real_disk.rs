//! The store on the real file system: its layout, its lock, and files that do not belong to it.

mod shared {
    pub(crate) mod blobs;
}

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use ferrite_blob::{CHUNK_BYTES, Error, ErrorKind, Store};
use ferrite_testkit::TempDir;
use ferrite_testkit::process::as_nobody;
use shared::blobs::{begin, complete, contents, digest_of, open, put};

const SIZE: usize = CHUNK_BYTES as usize + 1000;

/// Returns the path of a file of the blob with these contents.
fn path_of(store: &Path, folder: &str, contents: &[u8], extension: &str) -> PathBuf {
    store.join(folder).join("sha256").join(format!("{}{extension}", digest_of(contents).hex()))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o7777
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorKind {
    result.expect_err("an error").kind()
}

/// Returns a closed store.
fn closed(directory: &TempDir) -> PathBuf {
    let path = directory.join("store");
    open(&path).expect("a store");
    path
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_commit_moves_the_data_to_its_place() {
    let directory = TempDir::new("blob");
    let path = directory.join("store");
    let store = open(&path).expect("a store");
    let bytes = contents(1, SIZE);
    let partial = begin(&store, &bytes).expect("a download");
    put(&partial, 1, &bytes).expect("a chunk");
    let [data, map] = [".data", ".map"].map(|name| path_of(&path, "partial", &bytes, name));
    assert_eq!(fs::metadata(&data).expect("data").len(), SIZE as u64);
    assert_eq!((mode(&data), mode(&map), mode(&path)), (0o600, 0o600, 0o700));
    drop(partial);
    complete(&store, &bytes).expect("a blob");
    let blob = path_of(&path, "blobs", &bytes, "");
    assert!(fs::read(&blob).expect("a blob") == bytes);
    assert_eq!(mode(&blob), 0o444);
    assert!(!data.exists() && !map.exists());
    assert_eq!(fs::read_to_string(path.join("VERSION")).expect("a version"), "1\n");
}

#[test]
fn one_store_has_the_lock() {
    let directory = TempDir::new("blob");
    let path = directory.join("store");
    let store = open(&path).expect("a store");
    let error = open(&path).expect_err("the lock");
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("is used by another process"), "{error}");
    let partial = begin(&store, &contents(1, SIZE)).expect("a download");
    drop(store);
    assert_eq!(kind(open(&path)), ErrorKind::InUse, "a download keeps the store open");
    drop(partial);
    open(&path).expect("the lock");
}

#[test]
fn a_directory_that_is_no_store_is_left_alone() {
    let directory = TempDir::new("blob");
    directory.file("thesis.txt", "x");
    assert_eq!(kind(open(directory.path())), ErrorKind::Denied);
    assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 1);
    let file = directory.join("thesis.txt");
    assert_eq!(kind(open(&file)), ErrorKind::Denied);
    assert_eq!(kind(open(&directory.join("missing/store"))), ErrorKind::System);
}

#[test]
fn refuses_directories_that_others_may_change() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    for folder in ["", "blobs", "blobs/sha256", "partial", "bad"] {
        let folder = path.join(folder);
        let before = mode(&folder);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("a mode");
        let error = open(&path).expect_err("a directory that others may change");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("chmod go-w"), "{error}");
        fs::set_permissions(&folder, fs::Permissions::from_mode(before)).expect("a mode");
    }
    open(&path).expect("a store");
}

#[test]
fn follows_no_links_in_its_directory() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let elsewhere = directory.join("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    for folder in ["blobs", "partial/sha256", "bad"] {
        let (folder, aside) = (path.join(folder), directory.join("aside"));
        fs::rename(&folder, &aside).expect("aside");
        symlink(&elsewhere, &folder).expect("a link");
        assert_eq!(kind(open(&path)), ErrorKind::Denied);
        fs::remove_file(&folder).expect("removed");
        fs::rename(&aside, &folder).expect("back");
    }
    let target = directory.file("target", "1\n");
    for file in ["LOCK", "VERSION", "pins"] {
        let (file, aside) = (path.join(file), directory.join("aside"));
        let existed = fs::rename(&file, &aside).is_ok();
        symlink(&target, &file).expect("a link");
        assert_eq!(kind(open(&path)), ErrorKind::Denied, "{}", file.display());
        fs::remove_file(&file).expect("removed");
        if existed {
            fs::rename(&aside, &file).expect("back");
        }
    }
    assert_eq!(fs::read_to_string(target).expect("a file"), "1\n");
    assert_eq!(fs::read_dir(elsewhere).expect("a directory").count(), 0);
    open(&path).expect("a store");
}

#[test]
fn a_link_in_the_place_of_a_blob_is_no_blob() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let bytes = contents(1, 1000);
    let target = directory.file("target", &bytes);
    let blob = path_of(&path, "blobs", &bytes, "");
    symlink(&target, &blob).expect("a link");
    let store = open(&path).expect("a store");
    assert_eq!((store.recovered().blobs, store.recovered().ignored), (0, 1));
    assert!(store.blob(&digest_of(&bytes)).expect("no error").is_none());
    complete(&store, &bytes).expect("a blob");
    assert!(fs::symlink_metadata(&blob).expect("a blob").is_file());
    assert!(target.exists());
}

#[test]
fn writes_through_no_link_in_the_place_of_a_download() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let bytes = contents(1, 1000);
    let target = directory.file("target", vec![7; 1000]);
    drop(begin(&open(&path).expect("a store"), &bytes).expect("a download"));
    for name in [".data", ".map"] {
        let (file, aside) = (path_of(&path, "partial", &bytes, name), directory.join("aside"));
        let replace: [fn(&Path, &Path); 3] = [
            |target, file| symlink(target, file).expect("a link"),
            |target, file| fs::hard_link(target, file).expect("a hard link"),
            |_, file| {
                let made = std::process::Command::new("mkfifo").arg(file).status();
                assert!(made.expect("mkfifo").success());
            },
        ];
        for replace in replace {
            let store = open(&path).expect("a store");
            fs::rename(&file, &aside).expect("aside");
            replace(&target, &file);
            assert_eq!(kind(begin(&store, &bytes)), ErrorKind::Denied);
            fs::remove_file(&file).expect("removed");
            fs::rename(&aside, &file).expect("back");
        }
    }
    assert_eq!(fs::read(target).expect("a file"), [7; 1000]);
    complete(&open(&path).expect("a store"), &bytes).expect("a blob");
}

#[test]
fn ignores_names_that_are_not_its_own() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let hex = digest_of(b"").hex();
    let names = [
        "blobs/sha256/README".to_owned(),
        format!("blobs/sha256/{}", hex.to_uppercase()),
        format!("blobs/sha512/{hex}"),
        format!("partial/sha256/{hex}"),
        "partial/sha256/.data".to_owned(),
        "partial/sha256/x.map".to_owned(),
    ];
    for name in &names {
        fs::write(path.join(name), "x").expect("a file");
    }
    fs::create_dir(path.join(format!("blobs/sha256/{hex}"))).expect("a directory");
    let store = open(&path).expect("a store");
    let recovered = store.recovered();
    assert_eq!((recovered.blobs, recovered.partials), (0, 0));
    assert_eq!((recovered.removed, recovered.ignored), (0, 7));
    assert!(names.iter().all(|name| path.join(name).exists()));
    // The directory has the place of a blob.
    assert_eq!(kind(complete(&store, b"")), ErrorKind::Denied);
}

#[test]
fn removes_what_a_crash_may_leave() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let [whole, data, map] = [1, 2, 3].map(|number| contents(number, 1000));
    complete(&open(&path).expect("a store"), &whole).expect("a blob");
    let left = [
        path_of(&path, "partial", &whole, ".data"),
        path_of(&path, "partial", &whole, ".map"),
        path_of(&path, "partial", &data, ".data"),
        path_of(&path, "partial", &map, ".map"),
        path.join("pins.new"),
    ];
    for file in &left {
        fs::write(file, "x").expect("a file");
    }
    let store = open(&path).expect("a store");
    assert_eq!((store.recovered().removed, store.recovered().blobs), (5, 1));
    assert!(!left.iter().any(|file| file.exists()));
}

#[test]
fn a_blob_that_somebody_removed_or_cut_is_fetched_again() {
    let directory = TempDir::new("blob");
    let path = directory.join("store");
    let store = open(&path).expect("a store");
    let bytes = contents(1, 1000);
    let change: [fn(&Path); 2] = [
        |blob| fs::remove_file(blob).expect("removed"),
        |blob| {
            fs::remove_file(blob).expect("removed");
            fs::write(blob, "short").expect("a file");
        },
    ];
    for change in change {
        complete(&store, &bytes).expect("a blob");
        change(&path_of(&path, "blobs", &bytes, ""));
        assert!(store.blob(&digest_of(&bytes)).expect("no error").is_none());
        assert_eq!(store.usage().blobs, 0);
    }
    complete(&store, &bytes).expect("a blob");
}

#[test]
fn damaged_maps_of_any_kind_begin_again() {
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let bytes = contents(1, SIZE);
    let map = path_of(&path, "partial", &bytes, ".map");
    let good = {
        let partial = begin(&open(&path).expect("a store"), &bytes).expect("a download");
        put(&partial, 0, &bytes).expect("a chunk");
        fs::read(&map).expect("a map")
    };
    let mut long = good.clone();
    long.push(0);
    let mut all_set = good.clone();
    all_set[4096..].fill(0xff);
    for (text, present) in [
        (Vec::new(), 0),
        (b"FERRBMAP".to_vec(), 0),
        (vec![0xff; good.len()], 0),
        (good[..good.len() - 1].to_vec(), 0),
        (long, 0),
        (all_set, 0),
    ] {
        fs::write(&map, text).expect("a map");
        let store = open(&path).expect("a store");
        assert_eq!(begin(&store, &bytes).expect("a download").present(), present);
    }
    complete(&open(&path).expect("a store"), &bytes).expect("a blob");
}

#[test]
fn uses_no_files_of_other_users() {
    if !is_root() {
        return; // only root can create files of other users
    }
    let directory = TempDir::new("blob");
    let path = closed(&directory);
    let bytes = contents(1, 1000);
    let blob = path_of(&path, "blobs", &bytes, "");
    fs::write(&blob, &bytes).expect("a blob");
    std::os::unix::fs::chown(&blob, Some(65534), Some(65534)).expect("another owner");
    let store = open(&path).expect("a store");
    assert_eq!((store.recovered().blobs, store.recovered().ignored), (0, 1));
    drop(store);
    std::os::unix::fs::chown(path.join("partial"), Some(65534), None).expect("another owner");
    assert_eq!(kind(open(&path)), ErrorKind::Denied);
}

#[test]
fn resumes_a_download_whose_commit_was_undone() {
    let test = |path: &Path| {
        let bytes = contents(1, SIZE);
        let partial = begin(&open(path).expect("a store"), &bytes).expect("a download");
        put(&partial, 1, &bytes).expect("a chunk");
        drop(partial);
        // The crash has kept the mode, but not the name.
        let data = path_of(path, "partial", &bytes, ".data");
        fs::set_permissions(&data, fs::Permissions::from_mode(0o444)).expect("a mode");
        let store: Store = open(path).expect("a store");
        assert_eq!(begin(&store, &bytes).expect("a download").present(), 1);
        complete(&store, &bytes).expect("a blob");
    };
    let directory = TempDir::new("blob");
    let path = directory.join("store");
    if is_root() {
        // Modes do not bind root.
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(directory.path(), everybody).expect("a mode");
        as_nobody(|| test(&path));
    } else {
        test(&path);
    }
}
