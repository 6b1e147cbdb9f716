//! The table of cases. Each begins in an empty tree whose root belongs to root with mode 755, as root with umask 022.
//! `tests/kernel` plays them on tmpfs too: what stands here is what Linux does.

/// Name and lines of every case.
pub const CASES: &[(&str, &str)] = &[
    ("open makes a file, by mode and umask", OPEN_CREATES),
    ("open's flags", OPEN_FLAGS),
    ("open follows links, or not", OPEN_LINKS),
    ("a new file may be written whatever its mode", OPEN_NEW),
    ("reading and writing", READ_WRITE),
    ("appending", APPEND),
    ("offsets are shared by dup", DUP),
    ("sparse files, holes and allocation", SPARSE),
    ("truncation", TRUNCATE),
    ("open and unlinked", UNLINKED),
    ("mkdir and rmdir", DIRECTORIES),
    ("links", LINKS),
    ("symbolic links", SYMLINKS),
    ("names of 255 bytes, and of 256", LONG_NAMES),
    ("slashes at the end", SLASHES),
    ("rename of files", RENAME_FILES),
    ("rename of directories", RENAME_DIRECTORIES),
    ("rename with flags", RENAME_FLAGS),
    ("permissions by user, group and other", PERMISSIONS),
    ("search permission", SEARCH),
    ("sticky directories", STICKY),
    ("chmod and chown", CHANGE),
    ("set-id bits go when others write", SET_IDS),
    ("set-group-id directories", SET_GID_DIRECTORIES),
    ("times", TIMES),
    ("extended attributes", XATTRS),
    ("locks of files", FLOCK),
    ("locks of ranges", RANGES),
    ("reading a directory", LIST),
    ("pipes, sockets and devices", SPECIAL),
];

const OPEN_CREATES: &str = "
    open 0 a O_RDWR|O_CREAT 666
    fstat 0 = 100644 0 0 1 0
    umask 077
    open 1 b O_RDWR|O_CREAT 7777
    fstat 1 = 107700 0 0 1 0
    open 2 c O_RDWR = ENOENT
    open 2 x/c O_RDWR|O_CREAT 644 = ENOENT
    open 2 a/c O_RDWR|O_CREAT 644 = ENOTDIR
    open 2 EMPTY O_RDONLY = ENOENT
";

const OPEN_FLAGS: &str = "
    create a 644
    mkdir d 755
    open 0 a O_RDWR|O_CREAT|O_EXCL 644 = EEXIST
    open 0 d O_RDONLY|O_CREAT 644 = EISDIR
    open 0 d O_WRONLY = EISDIR
    open 0 d O_RDWR = EISDIR
    open 0 d O_RDONLY|O_TRUNC = EISDIR
    open 0 a O_RDONLY|O_DIRECTORY = ENOTDIR
    open 0 a O_RDONLY|O_DIRECTORY|O_CREAT 644 = EINVAL
    open 0 b/ O_RDONLY|O_CREAT 644 = EISDIR
    open 0 . O_RDONLY|O_CREAT 644 = EISDIR
    open 0 . O_RDONLY|O_CREAT|O_EXCL 644 = EEXIST
    open 0 a/ O_RDONLY = ENOTDIR
    open 0 a O_WRONLY
    write 0 hello = 5
    read 0 1 = EBADF
    open 1 a O_RDONLY|O_TRUNC
    fstat 1 = 100644 0 0 1 0
    write 1 x = EBADF
    open 2 a O_PATH
    read 2 1 = EBADF
    fchmod 2 600 = EBADF
    fstat 2 = 100644 0 0 1 0
    open 3 d O_RDONLY|O_DIRECTORY
    read 3 1 = EISDIR
    open 4 @3/x O_RDWR|O_CREAT 600
    stat d/x = 100600 0 0 1 0
    open 4 @0/x O_RDONLY = ENOTDIR
    close 4
    close 4 = EBADF
";

const OPEN_LINKS: &str = "
    symlink a l
    open 0 l O_RDONLY = ENOENT
    open 0 l O_RDWR|O_CREAT|O_EXCL 644 = EEXIST
    open 0 l O_RDWR|O_CREAT|O_NOFOLLOW 644 = ELOOP
    open 0 l O_RDWR|O_CREAT 644
    lstat a = 100644 0 0 1 0
    open 1 l O_RDONLY|O_NOFOLLOW = ELOOP
    open 1 l O_RDONLY|O_NOFOLLOW|O_DIRECTORY = ENOTDIR
    open 1 l O_PATH|O_NOFOLLOW
    fstat 1 = 120777 0 0 1 1
    mkdir d 755
    symlink d m
    open 2 m O_RDONLY|O_NOFOLLOW|O_DIRECTORY = ENOTDIR
    open 2 m/ O_RDONLY|O_NOFOLLOW
    fstat 2 = 40755 0 0 2 0
";

const OPEN_NEW: &str = "
    chmod . 777
    user 101
    open 0 a O_RDWR|O_CREAT 0
    write 0 x = 1
    pread 0 0 9 = \"x\"
    open 1 a O_RDWR = EACCES
    open 1 a O_RDONLY = EACCES
    fchmod 0 444
    open 1 a O_RDONLY
    write 0 y = 1
    open 2 a O_RDONLY|O_TRUNC = EACCES
    read 1 9 = \"xy\"
";

const READ_WRITE: &str = "
    open 0 a O_RDWR|O_CREAT 644
    write 0 one two three = 11
    read 0 5 = \"\"
    lseek 0 0 SEEK_SET = 0
    read 0 5 = \"onetw\"
    lseek 0 0 SEEK_CUR = 5
    pwrite 0 3 TWO = 3
    pread 0 0 100 = \"oneTWOthree\"
    lseek 0 0 SEEK_CUR = 5
    lseek 0 -6 SEEK_CUR = EINVAL
    lseek 0 -1 SEEK_END = 10
    read 0 5 = \"e\"
    lseek 0 100 SEEK_SET = 100
    read 0 5 = \"\"
    write 0 = 0
    fstat 0 = 100644 0 0 1 11
    write 0 x = 1
    fstat 0 = 100644 0 0 1 101
    pread 0 98 9 = \"\\x00\\x00x\"
    lseek 0 0 SEEK_HOLE = 101
    lseek 0 101 SEEK_DATA = ENXIO
    fsync 0
";

const APPEND: &str = "
    open 0 a O_RDWR|O_CREAT|O_APPEND 644
    open 1 a O_WRONLY
    write 0 one = 3
    write 1 x*10 = 10
    write 0 two three = 8
    lseek 0 0 SEEK_CUR = 18
    pwrite 0 0 end = 3
    pread 0 0 100 = \"xxxxxxxxxxtwothreeend\"
    lseek 0 0 SEEK_CUR = 18
";

const DUP: &str = "
    open 0 a O_RDWR|O_CREAT 644
    dup 0 1
    write 0 abc = 3
    lseek 1 0 SEEK_CUR = 3
    lseek 1 1 SEEK_SET = 1
    close 1
    read 0 9 = \"bc\"
    dup 1 2 = EBADF
";

const SPARSE: &str = "
    open 0 a O_RDWR|O_CREAT 644
    pwrite 0 1048576 x*4096 = 4096
    lseek 0 0 SEEK_DATA = 1048576
    lseek 0 0 SEEK_HOLE = 0
    lseek 0 1048576 SEEK_HOLE = 1052672
    fallocate 0 KEEP_SIZE|PUNCH_HOLE 1048576 4096
    lseek 0 0 SEEK_DATA = ENXIO
    pread 0 1048576 2 = \"\\x00\\x00\"
    fstat 0 = 100644 0 0 1 1052672
    fallocate 0 KEEP_SIZE 0 2097152
    fstat 0 = 100644 0 0 1 1052672
    fallocate 0 EXTEND 0 2097152
    fstat 0 = 100644 0 0 1 2097152
    pwrite 0 0 x*100 = 100
    fallocate 0 KEEP_SIZE|PUNCH_HOLE 1 2
    pread 0 0 4 = \"x\\x00\\x00x\"
    fallocate 0 PUNCH_HOLE 0 1 = EOPNOTSUPP
    fallocate 0 EXTEND 0 0 = EINVAL
    fallocate 0 EXTEND 9223372036854775807 1 = EFBIG
    open 1 a O_RDONLY
    fallocate 1 EXTEND 0 1 = EBADF
";

const TRUNCATE: &str = "
    open 0 a O_RDWR|O_CREAT 644
    write 0 hello = 5
    ftruncate 0 2
    ftruncate 0 5
    pread 0 0 9 = \"he\\x00\\x00\\x00\"
    lseek 0 0 SEEK_CUR = 5
    truncate a 100000
    fstat 0 = 100644 0 0 1 100000
    truncate a 0
    ftruncate 0 -1 = EINVAL
    truncate a -1 = EINVAL
    truncate b 0 = ENOENT
    mkdir d 755
    truncate d 0 = EISDIR
    open 1 a O_RDONLY
    ftruncate 1 0 = EINVAL
    open 1 d O_RDONLY
    ftruncate 1 0 = EINVAL
    write 0 x = 1
    fstat 0 = 100644 0 0 1 6
";

const UNLINKED: &str = "
    open 0 a O_RDWR|O_CREAT 644
    write 0 hello = 5
    unlink a
    stat a = ENOENT
    fstat 0 = 100644 0 0 0 5
    pread 0 0 9 = \"hello\"
    write 0 more = 4
    open 1 a O_RDWR|O_CREAT 600
    fstat 1 = 100600 0 0 1 0
    fstat 0 = 100644 0 0 0 9
    mkdir d 755
    open 2 d O_RDONLY|O_DIRECTORY
    rmdir d
    fstat 2 = 40755 0 0 0 0
    create @2/x 644 = ENOENT
    mkdir @2/x 755 = ENOENT
    open 3 @2/x O_RDWR|O_CREAT 644 = ENOENT
    stat @2/x = ENOENT
";

const DIRECTORIES: &str = "
    mkdir d 777
    lstat d = 40755 0 0 2 0
    mkdir d/e 7777
    lstat d/e = 41755 0 0 2 0
    lstat d = 40755 0 0 3 0
    mkdir d 755 = EEXIST
    mkdir . 755 = EEXIST
    mkdir d/.. 755 = EEXIST
    mkdir x/y 755 = ENOENT
    create f 644
    mkdir f 755 = EEXIST
    mkdir f/x 755 = ENOTDIR
    rmdir d = ENOTEMPTY
    rmdir f = ENOTDIR
    rmdir d/. = EINVAL
    rmdir d/e/.. = ENOTEMPTY
    rmdir x = ENOENT
    unlink d = EISDIR
    unlink d/. = EISDIR
    unlink x = ENOENT
    rmdir d/e
    rmdir d
    list . = [..:4 .:4 f:8]
";

const LINKS: &str = "
    create a 644
    link a b
    lstat a = 100644 0 0 2 0
    link a b = EEXIST
    link x c = ENOENT
    mkdir d 755
    link d c = EPERM
    link d a = EEXIST
    link a d/c
    link a/ c = ENOTDIR
    link a c/ = ENOENT
    link a d/ = EEXIST
    unlink a
    lstat b = 100644 0 0 2 0
    symlink b l
    link l m
    lstat m = 120777 0 0 2 1
    linkfollow l n
    lstat n = 100644 0 0 3 0
    open 0 n O_RDWR
    unlink n
    unlink b
    unlink d/c
    fstat 0 = 100644 0 0 0 0
";

const SYMLINKS: &str = "
    mkdir d 755
    create d/f 600
    symlink d l
    stat l/f = 100600 0 0 1 0
    readlink l = \"d\"
    readlink d = EINVAL
    readlink x = ENOENT
    symlink ../d/f d/up
    stat d/up = 100600 0 0 1 0
    symlink loop loop
    stat loop = ELOOP
    lstat loop = 120777 0 0 1 4
    symlink one two
    symlink two one
    open 0 one O_RDONLY = ELOOP
    open 0 one/x O_RDWR|O_CREAT 644 = ELOOP
    symlink x l = EEXIST
    symlink EMPTY e = ENOENT
    stat d/f/x = ENOTDIR
    symlink f d/g
    unlink d/g
    stat d/f = 100600 0 0 1 0
    lchown l 5 6
    lstat l = 120777 5 6 1 1
    stat l = 40755 0 0 2 0
    lstat l/ = 40755 0 0 2 0
    rmdir l = ENOTDIR
    rmdir l/ = ENOTDIR
    unlink l/ = ENOTDIR
";

const LONG_NAMES: &str = "
    create LONG 644
    stat LONG = 100644 0 0 1 0
    create LONGER 644 = ENAMETOOLONG
    stat LONGER = ENAMETOOLONG
    mkdir LONGER 755 = ENAMETOOLONG
    unlink LONGER = ENAMETOOLONG
    stat x/LONGER = ENOENT
    stat LONG/LONGER = ENOTDIR
    rename LONG LONGER = ENAMETOOLONG
    rename LONGER x = ENAMETOOLONG
    rename x LONGER = ENOENT
    rename LONG short
    link short LONG
    open 0 LONGER O_RDWR|O_CREAT 644 = ENAMETOOLONG
";

const SLASHES: &str = "
    create f 644
    stat f/ = ENOTDIR
    stat f/. = ENOTDIR
    mkdir d/ 755
    stat d// = 40755 0 0 2 0
    stat ./d/./. = 40755 0 0 2 0
    create g/ 644 = ENOENT
    create f/ 644 = EEXIST
    symlink f g/ = ENOENT
    unlink f/ = ENOTDIR
    unlink d/ = EISDIR
    unlink g/ = ENOENT
    rename f g/ = ENOTDIR
    rename f/ g = ENOTDIR
    rename d/ e/
    rmdir e/
";

const RENAME_FILES: &str = "
    create a 600
    create b 644
    mkdir d 755
    rename a c
    stat a = ENOENT
    rename c b
    stat b = 100600 0 0 1 0
    rename x b = ENOENT
    rename b d = EISDIR
    rename d b = ENOTDIR
    rename b d/b
    rename d/b d/b
    link d/b a
    rename a d/b
    stat a = 100600 0 0 2 0
    rename . x = EBUSY
    rename d/. x = EBUSY
    rename a d/.. = EBUSY
    rename a x/y = ENOENT
    rename a/x y = ENOTDIR
    symlink nowhere l
    rename a l
    lstat l = 100600 0 0 2 0
";

const RENAME_DIRECTORIES: &str = "
    mkdir a 755
    mkdir a/b 755
    mkdir c 755
    rename a a/x = EINVAL
    rename a a/b = EINVAL
    rename a a/b/c = EINVAL
    rename a/b a = ENOTEMPTY
    rename c a = ENOTEMPTY
    rename a c
    lstat . = 40755 0 0 3 0
    lstat c = 40755 0 0 3 0
    mkdir e 755
    rename c/b e/b
    lstat c = 40755 0 0 2 0
    lstat e = 40755 0 0 3 0
    create e/b/f 644
    rename c e/b = ENOTEMPTY
    open 0 e/b O_RDONLY|O_DIRECTORY
    rename e/b b
    stat @0/../b/f = 100644 0 0 1 0
";

const RENAME_FLAGS: &str = "
    create a 600
    create b 644
    mkdir d 755
    mkdir d/e 755
    rename2 NOREPLACE a b = EEXIST
    rename2 NOREPLACE a a = EEXIST
    rename2 NOREPLACE a c
    rename2 EXCHANGE c x = ENOENT
    rename2 EXCHANGE x c = ENOENT
    rename2 EXCHANGE c b
    stat c = 100644 0 0 1 0
    rename2 EXCHANGE c d/e
    stat c = 40755 0 0 2 0
    stat d = 40755 0 0 2 0
    stat d/e = 100644 0 0 1 0
    lstat . = 40755 0 0 4 0
    mkdir d/f 755
    rename2 EXCHANGE d d/f = EINVAL
    rename2 EXCHANGE d/f d = EINVAL
    rename2 NOREPLACE|EXCHANGE c d = EINVAL
";

const PERMISSIONS: &str = "
    create f 640
    chown f 101 201
    chmod f 640
    user 101/999
    open 0 f O_RDWR
    user 102/201
    open 0 f O_RDONLY
    open 0 f O_WRONLY = EACCES
    user 102/999/201
    access f 4
    access f 2 = EACCES
    access f 1 = EACCES
    user 103
    open 0 f O_RDONLY = EACCES
    truncate f 0 = EACCES
    user 0
    chmod f 047
    user 101/201
    open 0 f O_RDONLY = EACCES
    user 102/201
    open 0 f O_RDONLY
    open 0 f O_WRONLY = EACCES
    user 103
    open 0 f O_RDWR
    access f 7
    user 0
    chmod f 0
    open 0 f O_RDWR
    access f 6
    access f 1 = EACCES
    access f 8 = EINVAL
    chmod f 1
    access f 7
";

const SEARCH: &str = "
    mkdir d 700
    mkdir d/e 777
    create d/f 666
    user 101
    stat d = 40700 0 0 3 0
    stat d/f = EACCES
    stat d/x = EACCES
    stat d/. = EACCES
    stat d/.. = EACCES
    stat d/LONGER = EACCES
    list d = EACCES
    create d/x 644 = EACCES
    unlink d/f = EACCES
    rename d/f f = EACCES
    open 0 d O_PATH
    stat @0/f = EACCES
    user 0
    chmod d 711
    user 101
    stat d/f = 100644 0 0 1 0
    list d = EACCES
    create d/x 644 = EACCES
    create d/f 644 = EEXIST
    unlink d/x = ENOENT
    unlink d/f = EACCES
    rmdir d/e = EACCES
    link d/x y = ENOENT
    mkdir d/f 755 = EEXIST
    open 0 d/x O_RDWR|O_CREAT 644 = EACCES
    rename d/x y = ENOENT
    rename d/f y = EACCES
    user 0
    chmod d 722
    user 101
    create d/x 644 = EACCES
";

const STICKY: &str = "
    mkdir t 777
    chmod t 1777
    mkdir o 777
    chmod o 777
    user 101
    create t/a 666
    mkdir t/d 777
    create o/a 666
    user 102
    unlink t/a = EPERM
    rmdir t/d = EPERM
    unlink t/d = EPERM
    rename t/a t/b = EPERM
    rename t/a o/b = EPERM
    create t/b 644
    rename t/b t/a = EPERM
    rename o/a t/c
    unlink t/c = EPERM
    user 101
    rename t/a t/b = EPERM
    unlink t/c
    unlink t/a
    user 0
    chown t 102 102
    user 102
    rmdir t/d
";

const CHANGE: &str = "
    create f 644
    chown f 101 201
    user 102
    chmod f 600 = EPERM
    chown f 102 102 = EPERM
    chown f - - 
    user 101/201/202
    chmod f 2755
    stat f = 102755 101 201 1 0
    chown f 102 - = EPERM
    chown f - 203 = EPERM
    chown f - 202
    stat f = 100755 101 202 1 0
    chmod f 6711
    chown f 101 -
    stat f = 100711 101 202 1 0
    user 101/201
    chmod f 2755
    stat f = 100755 101 202 1 0
    user 0
    chmod f 6755
    chown f - -
    stat f = 100755 101 202 1 0
    chmod f 6644
    chown f 0 0
    stat f = 102644 0 0 1 0
    chmod x 600 = ENOENT
    mkdir d 755
    chmod d 7777
    chown d 101 201
    stat d = 47777 101 201 2 0
    user 101/999
    chmod d 2777
    stat d = 40777 101 201 2 0
    user 0
    symlink f l
    chmod l 600
    stat f = 100600 0 0 1 0
";

const SET_IDS: &str = "
    create f 644
    chmod f 6777
    user 101
    open 0 f O_RDWR
    write 0 = 0
    stat f = 106777 0 0 1 0
    write 0 x = 1
    stat f = 100777 0 0 1 1
    user 0
    chmod f 6767
    open 1 f O_RDWR
    write 1 x = 1
    stat f = 106767 0 0 1 1
    user 101
    truncate f 1
    stat f = 100767 0 0 1 1
    user 0
    chmod f 6777
    user 101
    ftruncate 0 0
    stat f = 100777 0 0 1 0
    user 0
    chmod f 4666
    user 101
    open 1 f O_WRONLY|O_TRUNC
    stat f = 100666 0 0 1 0
";

const SET_GID_DIRECTORIES: &str = "
    mkdir d 777
    chown d 0 201
    chmod d 2777
    mkdir d/e 755
    stat d/e = 42755 0 201 2 0
    user 101
    mkdir d/g 700
    stat d/g = 42700 101 201 2 0
    create d/f 644
    stat d/f = 100644 101 201 1 0
    create d/h 2755
    stat d/h = 100755 101 201 1 0
    create d/i 2644
    stat d/i = 102644 101 201 1 0
    user 101/201
    create d/j 2755
    stat d/j = 102755 101 201 1 0
    symlink x d/l
    lstat d/l = 120777 101 201 1 1
";

const TIMES: &str = "
    create f 666
    chmod f 666
    utimens f 1.2 3.999999999
    utimens f 1.1000000000 3.4 = EINVAL
    utimens x 1.2 3.4 = ENOENT
    utimens x omit omit
    user 101
    utimens f now now
    utimens f 1.2 3.4 = EPERM
    utimens f now omit = EPERM
    user 0
    chmod f 644
    user 101
    utimens f now now = EACCES
    utimens f now 1.1 = EPERM
    user 0
    chown f 101 -
    user 101
    utimens f now 1.1
    utimens f -5.3 omit
";

const XATTRS: &str = "
    create f 644
    setxattr f user.a one
    getxattr f user.a = \"one\"
    setxattr f user.a two 1 = EEXIST
    setxattr f user.b two 2 = ENODATA
    setxattr f user.b two 1
    setxattr f user.a three 2
    setxattr f trusted.t x
    listxattr f = [trusted.t user.a user.b]
    getxattr f user.c = ENODATA
    setxattr f other.a x = EOPNOTSUPP
    setxattr f user. x = EINVAL
    removexattr f user.b
    removexattr f user.b = ENODATA
    user 101
    getxattr f user.a = \"three\"
    getxattr f trusted.t = ENODATA
    setxattr f user.a x = EACCES
    setxattr f trusted.t x = EPERM
    removexattr f user.a = EACCES
    user 0
    chmod f 600
    user 101
    getxattr f user.a = EACCES
    user 0
    mkdir d 777
    chmod d 1777
    setxattr d user.a x
    user 101
    setxattr d user.a y = EPERM
    getxattr d user.a = \"x\"
";

const FLOCK: &str = "
    open 0 f O_RDWR|O_CREAT 644
    open 1 f O_RDONLY
    open 2 f O_RDONLY
    flock 0 1
    flock 1 1
    flock 2 2 = EAGAIN
    flock 1 2 = EAGAIN
    flock 2 2 = EAGAIN
    flock 0 0
    flock 2 2
    flock 0 1 = EAGAIN
    dup 2 3
    close 2
    flock 0 1 = EAGAIN
    close 3
    flock 0 2
    flock 0 1
    flock 1 1
";

const RANGES: &str = "
    open 0 f O_RDWR|O_CREAT 644
    open 1 f O_RDWR
    open 2 f O_RDONLY
    lock 0 2 0 10
    lock 1 2 9 1 = EAGAIN
    lock 1 1 9 1 = EAGAIN
    lock 1 2 10 0
    lock 0 2 1000000 1 = EAGAIN
    lock 0 1 5 1
    lock 1 1 5 1
    lock 0 2 4 2 = EAGAIN
    lock 1 0 0 0
    lock 0 2 0 0
    lock 1 1 3 -3 = EAGAIN
    lock 1 1 0 -1 = EINVAL
    lock 2 2 0 1 = EBADF
    lock 0 0 3 1
    lock 1 2 3 1
    lock 1 1 2 3 = EAGAIN
    close 0
    lock 1 1 0 0
    flock 2 2
";

const LIST: &str = "
    mkdir d 755
    create d/a 644
    mkdir d/b 755
    symlink x d/c
    create d/LONG 644
    unlink d/LONG
    create d/e1 644
    create d/e2 644
    create d/e3 644
    create d/e4 644
    create d/e5 644
    create d/e6 644
    create d/e7 644
    create d/e8 644
    create d/e9 644
    list d = [..:4 .:4 a:8 b:4 c:10 e1:8 e2:8 e3:8 e4:8 e5:8 e6:8 e7:8 e8:8 e9:8]
    list d/a = ENOTDIR
    list x = ENOENT
    chmod d 300
    user 101
    list d = EACCES
";

const SPECIAL: &str = "
    mknod p 10644
    lstat p = 10644 0 0 1 0
    mknod s 140644
    lstat s = 140644 0 0 1 0
    mknod c 20600 259
    lstat c = 20600 0 0 1 0
    mknod d 40755 = EPERM
    mknod x 170644 = EINVAL
    open 0 s O_RDONLY = ENXIO
    list . = [..:4 .:4 c:2 p:1 s:12]
    truncate p 0 = EINVAL
    chmod . 777
    user 101
    mknod e 20600 259 = EPERM
    mknod q 10600
    unlink q
";
