import java.nio.ByteBuffer;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** Maps a file to write to it, and uses it by calls meanwhile: Maps FILE. */
public class Maps {
    public static void main(String[] words) throws Exception {
        try (FileChannel file = FileChannel.open(Path.of(words[0]), StandardOpenOption.READ,
                StandardOpenOption.WRITE, StandardOpenOption.CREATE)) {
            int longs = 1 << 16;
            MappedByteBuffer map = file.map(FileChannel.MapMode.READ_WRITE, 0, 8L * longs);
            for (int index = 0; index < longs; index++) {
                map.putLong(8 * index, index);
            }
            map.force();
            ByteBuffer one = ByteBuffer.allocate(8);
            file.read(one, 8000);
            System.out.println(one.flip().getLong());
            file.write(one.clear().putLong(77).flip(), 16);
            System.out.println(map.getLong(16));
            System.out.println(file.size());
        }
    }
}
